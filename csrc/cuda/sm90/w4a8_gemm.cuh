// The persistent kernel of one GEMM. Two warpgroups multiply, a warp of a third one loads.
#pragma once
#include "w4a8_epilogue.cuh"
#include "w4a8_producer.cuh"

namespace moeq::sm90::w4a8 {

template <class Policy, Finish finish, int parts>
__device__ __forceinline__ void make_tile(const GemmArgs& args, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                          const Work& work, int warpgroup, int slot) {
  const Span<parts> span(work.width);
  Sums<parts> sums = {};
  multiply(sums, shared, ring, warpgroup, span, args, work);
  store<Policy, finish, parts>(args, shared, work, sums, span.tokens, warpgroup, slot);
}

template <class Policy, Finish finish>
__device__ __forceinline__ void consume(const GemmArgs& args, GemmShared<Policy>& shared) {
  // From one lane, so that the compiler knows it to be uniform: operand descriptors are made of it.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  Ring<kWorkSlots> work_ring;
  Ring<Policy::kStages> ring;
  if (Policy::kTileScales > 0 && warpgroup == 1) pass_turn(warpgroup);   // the first one begins
  while (true) {
    barrier_wait(shared_address(&shared.work_full[work_ring.slot]), work_ring.parity);
    const Work work = shared.work[work_ring.slot];
    if (work.expert < 0) break;
    if (work.width <= kMaxSingle) {
      make_tile<Policy, finish, 1>(args, shared, ring, work, warpgroup, work_ring.slot);
    } else {
      make_tile<Policy, finish, 2>(args, shared, ring, work, warpgroup, work_ring.slot);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.work_empty[work_ring.slot]));
    work_ring.advance();
  }
}

template <class Policy, Finish finish>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint8_t dynamic_shared[];
  GemmShared<Policy>& shared = *reinterpret_cast<GemmShared<Policy>*>(
      dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x >= kConsumerThreads) {
    registers_shrink<40>();
    if (threadIdx.x < kConsumerThreads + 32) produce(args, shared);
  } else {
    registers_grow<232>();
    consume<Policy, finish>(args, shared);
  }
}

struct GemmKernel {
  void (*kernel)(GemmArgs);
  int shared_bytes;
};

GemmKernel packed_kernel(Finish finish);
GemmKernel rows_kernel(Finish finish);
GemmKernel blocks_kernel(Finish finish);

template <class Policy>
GemmKernel kernel_of(Finish finish) {
  constexpr int kBytes = sizeof(GemmShared<Policy>) + 1024;
  switch (finish) {
    case Finish::kSwiglu:
      return {gemm_kernel<Policy, Finish::kSwiglu>, kBytes};
    case Finish::kLinear:
      return {gemm_kernel<Policy, Finish::kLinear>, kBytes};
    default:
      return {gemm_kernel<Policy, Finish::kOutput>, kBytes};
  }
}

}  // namespace moeq::sm90::w4a8
