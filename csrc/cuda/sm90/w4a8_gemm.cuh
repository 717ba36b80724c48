// The persistent kernel of a layer. Two warpgroups multiply; of a third one a warp loads, one counts what is stored,
// and two quantize the intermediate of experts that GEMM1 is done with.
#pragma once
#include "w4a8_epilogue.cuh"
#include "w4a8_intermediate.cuh"
#include "w4a8_producer.cuh"

namespace moeq::sm90::w4a8 {

template <class Policy, Finish finish, int parts>
__device__ __forceinline__ void make_tile(const GemmArgs& args, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                          const Work& work, int warpgroup, int slot) {
  const Span<parts> span(work.width);
  Sums<parts> sums = {};
  multiply(sums, shared, ring, warpgroup, span, work.second ? args.second : args.first, work,
           !work.second && args.problem.gated);
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
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.work_stored[work_ring.slot]));
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
    const int warp = threadIdx.x / 32 - kConsumerThreads / 32;
    if (warp == 0) {
      produce(args, shared);
    } else if (warp == 1) {
      report_stored(args, shared);
    } else {
      if (args.launches == Launches::kBoth) quantize_beside<Policy, finish == Finish::kSwiglu>(args);
    }
    allow_next_kernel();
  } else {
    registers_grow<232>();
    consume<Policy, finish>(args, shared);
  }
}

// Of one policy and finish.
struct LayerKernels {
  void (*gemm)(GemmArgs);
  void (*quantize)(GemmArgs);
  int shared_bytes;
};

LayerKernels packed_kernels(Finish finish);
LayerKernels rows_kernels(Finish finish);
LayerKernels blocks_kernels(Finish finish);

template <class Policy>
LayerKernels kernels_of(Finish finish) {
  constexpr int kBytes = sizeof(GemmShared<Policy>) + 1024;
  if (finish == Finish::kSwiglu) return {gemm_kernel<Policy, Finish::kSwiglu>, quantize_kernel<Policy, true>, kBytes};
  return {gemm_kernel<Policy, Finish::kLinear>, quantize_kernel<Policy, false>, kBytes};
}

}  // namespace moeq::sm90::w4a8
