// What calls were like that Python has checked and found right. A call that is like one of them in everything that is
// checked is right too, and comparing takes a fraction of the time. Of tensors nothing is kept but dtypes and sizes:
// their memory is that of each call.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "../generated/accepted.h"

namespace moeq::cpu {

// What a tensor is like that must be contiguous, or absent.
class Likeness {
 public:
  static constexpr int kMaxDims = 6;

  Likeness() = default;
  explicit Likeness(const Tensor& tensor);
  bool fits(const Tensor* tensor) const;

 private:
  int32_t dtype_ = 0;
  int32_t dims_ = -1;  // absent
  std::array<int64_t, kMaxDims> sizes_{};
};

constexpr int kWeights = 12;  // tensors of a layer, present or not

// A call with any number of tokens, but 0, and of experts of a token.
class AcceptedCall {
 public:
  explicit AcceptedCall(const ExpertsCall& call);

  bool fits(const ExpertsAcceptedCall& given) const;

  // The call of tensors that fit.
  ExpertsCall on(const ExpertsAcceptedCall& given, Tensor out) const;

 private:
  int32_t hidden_dtype_;
  int64_t hidden_size_;
  std::array<Likeness, kWeights> weights_;
  struct {
    std::string activation, scheme, act_format;
    double swiglu_alpha, swiglu_beta, swiglu_limit;
    int64_t local_expert_offset;
  } names_;
};

constexpr int64_t kAcceptedNames = 2048;  // numbers from 0 on
constexpr int kAcceptedPerNames = 8;

// A number that no names have had in this process, or -1 where there are no more. Who has lost what it stood for (a
// module that is loaded anew) gets another one.
int64_t new_accepted_names();

// Keeps what a call was like, for good, under the number of its names. False where there is no room, or where it is not
// one on unquantized hidden states whose output is like them, with routing weights on the output.
bool add_accepted(const ExpertsCall& call, int64_t names);

// What fits a call, or null.
const AcceptedCall* find_accepted(const ExpertsAcceptedCall& given);

// A matrix of the size, strides and dtype of this one, which is contiguous.
Tensor matrix_like(const Tensor& tensor);

}  // namespace moeq::cpu
