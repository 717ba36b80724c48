#include "accepted.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "../check.h"

namespace moeq::cpu {
namespace {

// As torch numbers it: a dtype that this library has no name for differs from others all the same.
int32_t dtype_number(const Tensor& tensor) {
  int32_t number = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  return number;
}

// Of any struct that has them; absent ones are null.
template <class Call>
std::array<const Tensor*, kWeights> weights_of(const Call& call) {
  const auto given = [](const OptionalTensor& tensor) { return tensor.has_value() ? &*tensor : nullptr; };
  return {&call.w13,
          given(call.w13_scale),
          given(call.w13_zero_point),
          given(call.g1_alphas),
          given(call.w13_bias),
          &call.w2,
          given(call.w2_scale),
          given(call.w2_zero_point),
          given(call.g2_alphas),
          given(call.w2_bias),
          given(call.a1_gscale),
          given(call.a2_gscale)};
}

bool is_matrix(const Tensor& tensor, int32_t dtype) {
  return tensor.dim() == 2 && dtype_number(tensor) == dtype && tensor.is_contiguous();
}

// Written once each, in order, and never freed: readers need no lock.
std::atomic<const AcceptedCall*> accepted[kAcceptedNames][kAcceptedPerNames];
std::mutex writing;
std::atomic<int64_t> given_names{0};

}  // namespace

Likeness::Likeness(const Tensor& tensor) : dtype_(dtype_number(tensor)), dims_(static_cast<int32_t>(tensor.dim())) {
  MOEQ_CHECK("accept_experts", dims_ <= kMaxDims, "tensors must have at most ", kMaxDims, " dimensions, got ", dims_);
  const auto sizes = tensor.sizes();
  std::copy(sizes.begin(), sizes.end(), sizes_.begin());
}

bool Likeness::fits(const Tensor* tensor) const {
  if (tensor == nullptr || dims_ < 0) return tensor == nullptr && dims_ < 0;
  if (dtype_number(*tensor) != dtype_ || tensor->dim() != dims_) return false;
  const auto sizes = tensor->sizes();
  return std::equal(sizes.begin(), sizes.end(), sizes_.begin()) && tensor->is_contiguous();
}

AcceptedCall::AcceptedCall(const ExpertsCall& call)
    : hidden_dtype_(dtype_number(call.hidden_states)),
      hidden_size_(call.hidden_states.size(1)),
      names_{call.activation,  call.scheme,       call.act_format,         call.swiglu_alpha,
             call.swiglu_beta, call.swiglu_limit, call.local_expert_offset} {
  const auto tensors = weights_of(call);
  for (int i = 0; i < kWeights; ++i) {
    if (tensors[i] != nullptr) weights_[i] = Likeness(*tensors[i]);
  }
}

bool AcceptedCall::fits(const ExpertsAcceptedCall& given) const {
  const Tensor &hidden_states = given.hidden_states, &ids = given.topk_ids, &gates = given.topk_weights;
  const bool tokens_fit = is_matrix(hidden_states, hidden_dtype_) && hidden_states.size(1) == hidden_size_ &&
                          is_matrix(ids, aoti_torch_dtype_int32()) && is_matrix(gates, aoti_torch_dtype_float32());
  if (!tokens_fit) return false;
  const int64_t rows = hidden_states.size(0), columns = ids.size(1);
  if (rows < 1 || columns < 1 || ids.size(0) != rows || gates.size(0) != rows || gates.size(1) != columns) return false;
  const auto tensors = weights_of(given);
  for (int i = 0; i < kWeights; ++i) {
    if (!weights_[i].fits(tensors[i])) return false;
  }
  return true;
}

ExpertsCall AcceptedCall::on(const ExpertsAcceptedCall& given, Tensor out) const {
  LayerCall layer{std::move(out),
                  given.hidden_states,
                  std::nullopt,
                  given.topk_ids,
                  given.topk_weights,
                  given.w13,
                  given.w13_scale,
                  given.w13_zero_point,
                  given.g1_alphas,
                  given.w13_bias,
                  given.w2,
                  given.w2_scale,
                  given.w2_zero_point,
                  given.g2_alphas,
                  given.w2_bias,
                  given.a1_gscale,
                  given.a2_gscale,
                  names_.activation,
                  names_.swiglu_alpha,
                  names_.swiglu_beta,
                  names_.swiglu_limit,
                  names_.local_expert_offset,
                  false};
  return ExpertsCall{std::move(layer), names_.scheme, names_.act_format};
}

int64_t new_accepted_names() {
  const int64_t number = given_names.fetch_add(1);
  return number < kAcceptedNames ? number : -1;
}

bool add_accepted(const ExpertsCall& call, int64_t names) {
  const bool is_plain = !call.hidden_states_scale.has_value() && !call.router_weight_on_input &&
                        call.hidden_states.dim() == 2 && call.out.dim() == 2 &&
                        dtype_number(call.out) == dtype_number(call.hidden_states) &&
                        call.out.size(1) == call.hidden_states.size(1);
  if (!is_plain || names < 0 || names >= kAcceptedNames) return false;
  auto like = std::make_unique<const AcceptedCall>(call);
  const std::lock_guard<std::mutex> lock(writing);
  for (auto& place : accepted[names]) {
    if (place.load(std::memory_order_relaxed) != nullptr) continue;
    place.store(like.release(), std::memory_order_release);
    return true;
  }
  return false;
}

const AcceptedCall* find_accepted(const ExpertsAcceptedCall& given) {
  if (given.names < 0 || given.names >= kAcceptedNames) return nullptr;
  for (const auto& place : accepted[given.names]) {
    const AcceptedCall* found = place.load(std::memory_order_acquire);
    if (found == nullptr || found->fits(given)) return found;
  }
  return nullptr;
}

Tensor matrix_like(const Tensor& tensor) {
  // As torch.empty_like has them: a row of a wide matrix is contiguous, too.
  const int64_t sizes[] = {tensor.size(0), tensor.size(1)}, strides[] = {tensor.stride(0), tensor.stride(1)};
  const int32_t dtype = dtype_number(tensor), cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides, dtype, cpu, 0, &made));
  return Tensor(made);
}

}  // namespace moeq::cpu
