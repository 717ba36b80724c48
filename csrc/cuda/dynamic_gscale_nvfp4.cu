// moeq_C::dynamic_gscale_nvfp4_cuda: the gscale of each token, from the largest magnitude of its row.
#include <torch/csrc/stable/library.h>

#include "launch.cuh"
#include "nvfp4_block.cuh"

namespace moeq {
namespace {

// One thread block per row, 16 elements a thread and step.
// Magnitudes are compared as bits: the order is the same, NaN comes out largest, and sm_80 reduces integers in
// hardware but not floats.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    dynamic_gscale_kernel(const uint4* __restrict__ x, float* __restrict__ gscale, int64_t blocks_per_row) {
  constexpr int kLoads = kNvfp4Block / Element::kPerLoad;
  const uint4* row = x + static_cast<int64_t>(blockIdx.x) * blocks_per_row * kLoads;
  float amax = 0.0f;
  for (int64_t block = threadIdx.x; block < blocks_per_row; block += blockDim.x) {
    float values[kNvfp4Block];
    load16<Element>(row + block * kLoads, values);
#pragma unroll
    for (int i = 0; i < kNvfp4Block; ++i) {
      amax = max_magnitude(amax, values[i]);
    }
  }
  __shared__ uint32_t warp_amax[kThreads / 32];
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, bits_of(amax));
  if (threadIdx.x % 32 == 0) {
    warp_amax[threadIdx.x / 32] = of_warp;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t of_row = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
      of_row = max(of_row, warp_amax[warp]);
    }
    gscale[blockIdx.x] = nvfp4_dynamic_gscale(of_row);
  }
}

// Whole warps, no more than the row has work for.
unsigned threads_of(int64_t blocks_per_row) {
  const int64_t warps = (blocks_per_row + 31) / 32;
  return static_cast<unsigned>(warps < 1 ? 32 : (warps * 32 < kThreads ? warps * 32 : kThreads));
}

// x [rows, K] bf16, f16 or f32 -> float32 [rows], multiplies: see nvfp4_dynamic_gscale.
Tensor dynamic_gscale_nvfp4(const Tensor& x_given) {
  constexpr const char* kOp = "dynamic_gscale_nvfp4_cuda";
  const Tensor x = aligned_activations(kOp, x_given);
  const int64_t rows = x.size(0);
  const int64_t blocks_per_row = x.size(1) / kNvfp4Block;
  Tensor gscale = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  if (rows == 0) {
    return gscale;
  }
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  with_element(kOp, x, [&](auto element) {
    using Element = decltype(element);
    dynamic_gscale_kernel<Element><<<grid_of(kOp, rows), threads_of(blocks_per_row), 0, current_stream(x)>>>(
        static_cast<const uint4*>(x.const_data_ptr()), static_cast<float*>(gscale.mutable_data_ptr()), blocks_per_row);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return gscale;
}

}  // namespace
}  // namespace moeq

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("dynamic_gscale_nvfp4_cuda", TORCH_BOX(&moeq::dynamic_gscale_nvfp4));
}
