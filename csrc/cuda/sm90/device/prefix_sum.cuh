// Exclusive prefix sums over the threads of a block.
#pragma once

namespace moeq::sm90 {

// Of `threads` threads, all of the block. `total` becomes everybody's sum; warp_sums: shared, one for each warp.
template <int threads>
__device__ int prefix_sum(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < threads / 32; i++) {
    const int of_warp = warp_sums[i];
    before += i < warp ? of_warp : 0;
    all += of_warp;
  }
  total = all;
  __syncthreads();
  return before + sum - value;
}

}  // namespace moeq::sm90
