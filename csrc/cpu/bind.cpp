#include "bind.h"

#include <torch/headeronly/core/ScalarType.h>

#include "../check.h"

namespace moeq::cpu {
namespace {

using torch::headeronly::ScalarType;

constexpr const char* kOp = "experts";

// Plain weights have no groups; a kernel reads two units at a time.
SchemeLayout layout_of(Scheme scheme, DType weight_dtype) {
  SchemeLayout layout = layout_of(scheme);
  if (scheme == Scheme::kNone) {
    layout.unit_bytes = kUnit * kPanelRows * (weight_dtype == DType::kFloat32 ? 4 : 2);
    layout.group_units = 2;
  }
  return layout;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

// [E, panels, groups, 16], or one per tile of 128 x 128: [E, row tiles, groups].
void bind_scale(const char* name, const Tensor& scale, Scheme scheme, const SchemeLayout& storage, int64_t experts,
                Weight& weight) {
  check_memory(name, scale);
  MOEQ_CHECK(kOp, storage.group_scale_bytes > 0 && scale.dim() >= 3, name, "_scale must have 3 or 4 dimensions");
  const int64_t groups = scale.size(2);
  int64_t group_bytes = storage.group_scale_bytes;
  if (storage.group_units == 0) {
    weight.scale_dtype = dtype_of(scale, "scale");
    group_bytes *= static_cast<int64_t>(scale.element_size());
    MOEQ_CHECK(kOp, groups >= 1 && weight.units % groups == 0, name, "_scale must have groups of equal size");
    weight.group_units = weight.units / groups;
  }
  MOEQ_CHECK(kOp, groups == divide_up(weight.units, weight.group_units), name, "_scale must have one column per group");
  weight.scale_panels = storage.scale_panels;
  weight.panel_scale_bytes = groups * group_bytes;
  const int64_t rows = divide_up(weight.panels / weight.halves, weight.scale_panels) * weight.halves;
  weight.expert_scale_bytes = rows * weight.panel_scale_bytes;
  MOEQ_CHECK(kOp, bytes_of(scale) == experts * weight.expert_scale_bytes, name, "_scale must have ",
             experts * weight.expert_scale_bytes, " bytes, got ", bytes_of(scale));
  weight.scale = static_cast<const uint8_t*>(scale.const_data_ptr());
}

// One byte per row and group, as the scales.
void bind_zero_point(const char* name, const Tensor& zero_point, int64_t experts, Weight& weight) {
  check_memory(name, zero_point);
  weight.panel_zero_bytes = divide_up(weight.units, weight.group_units) * kPanelRows;
  MOEQ_CHECK(kOp, bytes_of(zero_point) == experts * weight.panels * weight.panel_zero_bytes, name,
             "_zero_point must have one byte per row and group");
  weight.zero_point = static_cast<const uint8_t*>(zero_point.const_data_ptr());
}

}  // namespace

void check_memory(const char* name, const Tensor& tensor) {
  MOEQ_CHECK(kOp, tensor.is_cpu(), name, " must be on the CPU");
  MOEQ_CHECK(kOp, tensor.is_contiguous(), name, " must be contiguous");
  int64_t held = 0;  // a storage may have been resized under its tensors, as FSDP does
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &held));
  const int64_t skipped = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  MOEQ_CHECK(kOp, held - skipped >= bytes_of(tensor), name, " must hold ", bytes_of(tensor), " bytes, got ",
             held - skipped);
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  MOEQ_CHECK(kOp, address % tensor.element_size() == 0, name, " must start at a multiple of ", tensor.element_size(),
             " bytes");
}

DType dtype_of(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::BFloat16) return DType::kBFloat16;
  if (type == ScalarType::Half) return DType::kFloat16;
  MOEQ_CHECK(kOp, type == ScalarType::Float, name, " must have dtype bfloat16, float16 or float32");
  return DType::kFloat32;
}

const float* bind_floats(const char* name, const OptionalTensor& tensor, int64_t numel) {
  if (!tensor.has_value()) return nullptr;
  check_memory(name, *tensor);
  MOEQ_CHECK(kOp, tensor->scalar_type() == ScalarType::Float, name, " must have dtype float32");
  MOEQ_CHECK(kOp, numel < 0 || tensor->numel() == numel, name, " must have ", numel, " elements, got ",
             tensor->numel());
  return static_cast<const float*>(tensor->const_data_ptr());
}

Weight bind_weight(const char* name, const WeightTensors& tensors, Scheme scheme, int64_t units, int64_t halves) {
  const Tensor& codes = tensors.codes;
  check_memory(name, codes);
  MOEQ_CHECK(kOp, codes.dim() == 4 && codes.size(2) == units, name, " must have shape [experts, panels, ", units,
             ", unit]");
  const DType weight_dtype = scheme == Scheme::kNone ? dtype_of(codes, name) : DType::kFloat32;
  const SchemeLayout storage = layout_of(scheme, weight_dtype);
  const int64_t experts = codes.size(0);
  Weight weight;
  weight.panels = codes.size(1);
  weight.units = units;
  weight.group_units = storage.group_units > 0 ? storage.group_units : units;
  weight.panel_bytes = units * storage.unit_bytes;
  MOEQ_CHECK(kOp, bytes_of(codes) == experts * weight.panels * weight.panel_bytes, name, " must have units of ",
             storage.unit_bytes, " bytes");
  weight.codes = static_cast<const uint8_t*>(codes.const_data_ptr());

  weight.halves = halves;
  if (tensors.scale.has_value()) bind_scale(name, *tensors.scale, scheme, storage, experts, weight);
  MOEQ_CHECK(kOp, weight.scale != nullptr || scheme == Scheme::kNone || scheme == Scheme::kFp8, name,
             "_scale must be given");
  if (tensors.zero_point.has_value()) bind_zero_point(name, *tensors.zero_point, experts, weight);
  weight.alphas = bind_floats("alphas", tensors.alphas, -1);
  if (weight.alphas != nullptr) {
    weight.alpha_columns = tensors.alphas->numel() / (experts > 0 ? experts : 1);
    MOEQ_CHECK(kOp,
               tensors.alphas->numel() == experts * weight.alpha_columns && weight.alpha_columns >= 1 &&
                   weight.alpha_columns <= 2,
               "alphas must have shape [experts] or [experts, 2]");
  }
  weight.bias = bind_floats("bias", tensors.bias, -1);
  if (weight.bias != nullptr) {
    weight.bias_rows = tensors.bias->numel() / (experts * halves > 0 ? experts * halves : 1);
    MOEQ_CHECK(kOp, tensors.bias->numel() == experts * halves * weight.bias_rows, name,
               "_bias must have one row per expert");
  }
  return weight;
}

ActQuant bind_act(const char* name, ActFormat format, DType dtype, const OptionalTensor& gscale, int64_t num_experts) {
  ActQuant quant;
  quant.format = format;
  quant.dtype = dtype;
  quant.gscale = bind_floats(name, gscale, -1);
  if (quant.gscale != nullptr) {
    quant.gscale_count = gscale->numel();
    MOEQ_CHECK(kOp, quant.gscale_count == 1 || quant.gscale_count == num_experts, name,
               " must have shape [] or [experts]");
  }
  return quant;
}

}  // namespace moeq::cpu
