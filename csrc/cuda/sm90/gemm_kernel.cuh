// Both GEMMs of a layer in one persistent kernel. Two warpgroups multiply, one loads.
#pragma once
#include "gemm_finish_gated.cuh"
#include "gemm_finish_plain.cuh"
#include "gemm_finish_second.cuh"
#include "gemm_producer.cuh"

namespace moeq::sm90 {

template <class Tile, Finish finish>
__device__ __forceinline__ void consume(const GemmArgs& args, GemmShared& shared) {
  Staging staging(shared, threadIdx.x / 128);
  Ring<kWorkSlots> work_ring;
  Consumer at(shared, staging.warpgroup);
  while (true) {
    const Work work = wait_for_work(shared, work_ring);
    if (work.expert < 0) break;
    fetch_alphas(args.problem, work, staging);
    if (work.second) prefetch_slots(args, shared, work, staging);
    Accumulators acc;
    multiply_tile<Tile>(acc, shared, at, work);
    if (work.second) {
      finish_second(args, shared, work, acc, staging);
    } else {
      if constexpr (finish == Finish::kPlain) {
        finish_plain(args, work, acc, staging);
      } else {
        finish_gated<finish>(args, shared, work, acc, staging);
      }
      // The barrier also keeps the staging from being overwritten early.
      staging.synchronize();
      if (staging.thread == 0) {
        fence_async_proxy();   // GEMM2 reads the intermediate by bulk copies
        add_release(args.schedule.finished + work.expert, 1);
      }
    }
    release_work(shared, work_ring);
  }
}

template <class Tile, Finish finish>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint8_t dynamic_shared[];
  GemmShared& shared = *reinterpret_cast<GemmShared*>(
      dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x >= 128 * kConsumers) {
    registers_shrink<40>();
    const int warp = threadIdx.x / 32 - 4 * kConsumers;
    if (warp == 0) load_all(args, shared);
    if (warp == 1 && threadIdx.x % 32 == 0) find_all_work(args, shared);
    allow_next_kernel();
  } else {
    registers_grow<232>();
    consume<Tile, finish>(args, shared);
  }
}

constexpr int kGemmSharedBytes = sizeof(GemmShared) + 1024;

// Launches a kernel of this family on every multiprocessor.
using GemmKernel = void (*)(GemmArgs);
GemmKernel nvfp4_swiglu_kernel();
GemmKernel nvfp4_gated_kernel();
GemmKernel nvfp4_plain_kernel();

}  // namespace moeq::sm90
