// The persistent kernel of one GEMM. Two warpgroups multiply, a warp of a third one loads.
#pragma once
#include "w4a8_epilogue.cuh"
#include "w4a8_producer.cuh"

namespace moeq::sm90::w4a8 {

template <class Policy, Finish finish, int parts>
__device__ __forceinline__ void make_tile(const GemmArgs& args, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                          const Work& work, int warpgroup, const Ring<kWorkSlots>& works) {
  const Span<parts> span(work.width);
  Sums<parts> sums = {};
  const Steps steps{kept(args.k_tiles), kept(threadIdx.x % 128)};
  if constexpr (Policy::kTileScales > 0) {
    multiply_decoded(sums, shared, ring, warpgroup, span, steps);
  } else {
    multiply_bytes<finish == Finish::kOutput>(sums, shared, ring, warpgroup, span, steps, args, work);
  }
  store<Policy, finish, parts>(args, shared, work, sums, span.tokens, warpgroup, works.slot, works.parity);
}

template <class Policy, Finish finish>
__device__ __forceinline__ void consume(const GemmArgs& args, GemmShared<Policy>& shared) {
  // From one lane, so that the compiler knows it to be uniform: operand descriptors are made of it.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  Ring<kWorkSlots> work_ring;
  Ring<Policy::kStages> ring;
  while (true) {
    barrier_wait(shared_address(&shared.work_full[work_ring.slot]), work_ring.parity);
    const Work work = shared.work[work_ring.slot];
    if (work.expert < 0) break;
    if (Policy::kWidth <= kMaxSingle || work.width <= kMaxSingle) {
      make_tile<Policy, finish, 1>(args, shared, ring, work, warpgroup, work_ring);
    } else {
      make_tile<Policy, finish, 2>(args, shared, ring, work, warpgroup, work_ring);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.work_empty[work_ring.slot]));
    work_ring.advance();
  }
}

template <class Policy, Finish finish>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint8_t dynamic_shared[];
  GemmShared<Policy>& shared =
      *reinterpret_cast<GemmShared<Policy>*>(dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();
  if (threadIdx.x >= kConsumerThreads) {
    registers_shrink<40>();
    const int warp = (threadIdx.x - kConsumerThreads) / 32;
    if (warp == 0) produce(args, shared);
    if (warp == 1) load_rows<Policy, finish>(args, shared);
  } else {
    registers_grow<232>();
    consume<Policy, finish>(args, shared);
  }
}

struct GemmKernel {
  void (*kernel)(GemmArgs);
  int shared_bytes;
};

GemmKernel kernel_of(Weights weights, Finish finish, bool wide);

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
