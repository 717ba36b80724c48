// A router's weights, from what ops get to what kernels read, and how their product is divided.
#pragma once
#include "op_layer.h"
#include "../routing/route_hidden.h"

namespace moeq::sm90 {

// bfloat16 [rows, columns], rows at multiples of 16 bytes.
inline const void* rows_of(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t columns,
                           const Tensor& beside) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == beside.get_device_index() && tensor.dim() == 2 &&
                      tensor.size(0) == rows && tensor.size(1) == columns && tensor.stride(1) == 1 &&
                      tensor.stride(0) % hidden::kSizeMultiple == 0 && tensor.scalar_type() == ScalarType::BFloat16 &&
                      is_aligned(tensor),
                  "moeq_C::", op, ": ", name, " must be a bfloat16 matrix [", rows, ", ", columns,
                  "] on the device of ids, rows at multiples of 16 bytes");
  return tensor.const_data_ptr();
}

// Contiguous, of any type that logits may have; null where it is absent.
inline const void* values_of(const char* op, const char* name, const OptionalTensor& tensor, int64_t count,
                             const Tensor& beside, LogitType& type) {
  if (!tensor.has_value()) return nullptr;
  type = logit_type_of(op, *tensor);
  STD_TORCH_CHECK(tensor->is_cuda() && tensor->get_device_index() == beside.get_device_index() &&
                      tensor->is_contiguous() && tensor->numel() == count,
                  "moeq_C::", op, ": ", name, " must be contiguous, on the device of ids, with ", count, " elements");
  return tensor->const_data_ptr();
}

// Sixteen multiprocessors side by side are there for sure where nobody else has a share of the device.
inline RouteHiddenPlan plan_of(const char* op, int64_t blocks, int64_t warps, const Partition& partition) {
  constexpr int kPortableBlocks = 8;
  STD_TORCH_CHECK(
      (blocks == kPortableBlocks || blocks == 2 * kPortableBlocks) && warps >= 1 && warps <= hidden::kMaxWarps,
      "moeq_C::", op, ": blocks must be 8 or 16, warps at most ", hidden::kMaxWarps);
  const int most = partition.whole_device ? 2 * kPortableBlocks : kPortableBlocks;
  return {static_cast<int>(blocks < most ? blocks : most), static_cast<int>(warps)};
}

}  // namespace moeq::sm90
