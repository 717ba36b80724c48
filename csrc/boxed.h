// Ops whose arguments are a struct of generated/calls.h. It is made of them here, in the order that the schema and the
// struct have from one list, and nowhere else.
#pragma once
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <utility>

#include "generated/calls.h"

namespace moeq {

template <class Call, void (*body)(const Call&), class Types = typename Call::Types>
struct Boxed;

template <class Call, void (*body)(const Call&), class... T>
struct Boxed<Call, body, std::tuple<T...>> {
  static void run(T... arguments) { body(Call{std::move(arguments)...}); }
};

}  // namespace moeq

// body: void (const Call&).
#define MOEQ_BOX(Call, body) TORCH_BOX((&moeq::Boxed<Call, body>::run))
