// moeq_C::quantize_nvfp4_cuda: activations to NVFP4, one thread per block of 16.
//
// Memory bound: per element 2 (or 4) bytes are read and 0.5625 written, so that time is bytes over bandwidth as long
// as the arithmetic stays under about 17 instructions an element on a Hopper GPU (here 14). Reads are 16 bytes a
// thread, writes 8 bytes a thread (codes) and 1 byte a thread (scales), all contiguous across a warp.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "divide_by.cuh"
#include "launch.cuh"
#include "nvfp4_block.cuh"

namespace moeq {
namespace {

// Row of a block, where each has a gscale of its own. Only blocks from 2^31 on (more than 64 GiB of bf16) pay for a
// real division.
struct RowOf {
  int64_t blocks_per_row;
  DivideBy divide;

  __device__ __forceinline__ int64_t operator()(int64_t block) const {
    return block <= INT32_MAX ? static_cast<int64_t>(divide(static_cast<uint32_t>(block))) : block / blocks_per_row;
  }
};

template <typename Element, bool kPerRow>
__global__ void __launch_bounds__(kThreads)
    quantize_nvfp4_kernel(const uint4* __restrict__ x, const float* __restrict__ gscale, uint2* __restrict__ codes,
                          uint8_t* __restrict__ scale, int64_t blocks, RowOf row_of) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (block >= blocks) {
    return;
  }
  // Asked for before x is waited for, or the two latencies would add up.
  const float row_gscale = __ldg(gscale + (kPerRow ? row_of(block) : 0));
  float values[kNvfp4Block];
  load16<Element>(x + block * (kNvfp4Block / Element::kPerLoad), values);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kNvfp4Block; ++i) {
    amax = max_magnitude(amax, values[i]);
  }
  const Nvfp4Block quantized = nvfp4_quantize_block(values, amax, row_gscale);
  codes[block] = make_uint2(quantized.codes[0], quantized.codes[1]);
  scale[block] = static_cast<uint8_t>(quantized.scale);
}

// x [rows, K] bf16, f16 or f32; gscale f32 [] or [rows], multiplies. -> codes uint8 [rows, K/2], low nibble = even
// element; scale float8_e4m3fn [rows, K/16], linear, multiplies. Bit-equal to the CPU's.
std::tuple<Tensor, Tensor> quantize_nvfp4(const Tensor& x_given, const Tensor& gscale) {
  constexpr const char* kOp = "quantize_nvfp4_cuda";
  const Tensor x = aligned_activations(kOp, x_given);
  const int64_t rows = x.size(0);
  const int64_t columns = x.size(1);
  const bool per_row = gscale.dim() == 1;
  STD_TORCH_CHECK(gscale.scalar_type() == ScalarType::Float && gscale.is_contiguous() &&
                      gscale.get_device_index() == x.get_device_index() && gscale.is_cuda() &&
                      (gscale.dim() == 0 || (per_row && gscale.size(0) == rows)),
                  "moeq_C::", kOp, ": gscale must be a float32 scalar or one number per row, on the device of x");
  Tensor codes = torch::stable::new_empty(x, {rows, columns / 2}, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(x, {rows, columns / kNvfp4Block}, ScalarType::Float8_e4m3fn);
  const int64_t blocks_per_row = columns / kNvfp4Block;
  const int64_t blocks = rows * blocks_per_row;
  if (blocks == 0) {
    return {codes, scale};
  }
  STD_TORCH_CHECK(blocks_per_row <= INT32_MAX, "moeq_C::", kOp, ": x.shape[1] must be at most 2^35, got ", columns);
  const RowOf row_of{blocks_per_row, DivideBy::of(static_cast<uint32_t>(blocks_per_row))};
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  with_element(kOp, x, [&](auto element) {
    using Element = decltype(element);
    auto* kernel = per_row ? &quantize_nvfp4_kernel<Element, true> : &quantize_nvfp4_kernel<Element, false>;
    kernel<<<grid_of(kOp, (blocks + kThreads - 1) / kThreads), kThreads, 0, current_stream(x)>>>(
        static_cast<const uint4*>(x.const_data_ptr()), static_cast<const float*>(gscale.const_data_ptr()),
        static_cast<uint2*>(codes.mutable_data_ptr()), static_cast<uint8_t*>(scale.mutable_data_ptr()), blocks, row_of);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {codes, scale};
}

}  // namespace
}  // namespace moeq

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) { m.impl("quantize_nvfp4_cuda", TORCH_BOX(&moeq::quantize_nvfp4)); }
