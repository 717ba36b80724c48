#include "bind.h"

#include <torch/headeronly/core/ScalarType.h>

#include "../check.h"

namespace moeq::cpu {
namespace {

using torch::headeronly::ScalarType;

constexpr const char* kOp = "experts";

// What the scheme stores: bytes of one unit of sixteen rows, and of the scales of one group.
struct Storage {
  int64_t unit_bytes;
  int64_t group_units;
  int64_t group_scale_bytes;
};

Storage storage_of(Scheme scheme, DType weight_dtype) {
  switch (scheme) {
    case Scheme::kNvfp4:
      return {128, 1, kPanelRows};
    default:
      return {weight_dtype == DType::kFloat32 ? 1024 : 512, 2, 0};
  }
}

int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

void check_memory(const char* name, const Tensor& tensor) {
  MOEQ_CHECK(kOp, tensor.is_cpu(), name, " must be on the CPU");
  MOEQ_CHECK(kOp, tensor.is_contiguous(), name, " must be contiguous");
}

}  // namespace

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
  const Storage storage = storage_of(scheme, weight_dtype);
  const int64_t experts = codes.size(0);
  Weight weight;
  weight.panels = codes.size(1);
  weight.units = units;
  weight.group_units = storage.group_units;
  weight.panel_bytes = units * storage.unit_bytes;
  MOEQ_CHECK(kOp, bytes_of(codes) == experts * weight.panels * weight.panel_bytes, name, " must have units of ",
             storage.unit_bytes, " bytes");
  weight.codes = static_cast<const uint8_t*>(codes.const_data_ptr());

  if (storage.group_scale_bytes > 0) {
    MOEQ_CHECK(kOp, tensors.scale.has_value(), name, "_scale must be given");
    check_memory(name, *tensors.scale);
    const int64_t groups = (units + storage.group_units - 1) / storage.group_units;
    weight.panel_scale_bytes = groups * storage.group_scale_bytes;
    weight.expert_scale_bytes = weight.panels * weight.panel_scale_bytes;
    MOEQ_CHECK(kOp, bytes_of(*tensors.scale) == experts * weight.expert_scale_bytes, name, "_scale must have ",
               experts * weight.expert_scale_bytes, " bytes");
    weight.scale = static_cast<const uint8_t*>(tensors.scale->const_data_ptr());
  }
  weight.alphas = bind_floats("alphas", tensors.alphas, -1);
  if (weight.alphas != nullptr) {
    weight.alpha_columns = tensors.alphas->numel() / (experts > 0 ? experts : 1);
    MOEQ_CHECK(kOp, tensors.alphas->numel() == experts * weight.alpha_columns && weight.alpha_columns >= 1 &&
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

ActQuant bind_act(const char* name, ActFormat format, DType dtype, const OptionalTensor& gscale,
                  int64_t num_experts) {
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
