// The one way in which C++ reports a bad argument. Python has validated before; these checks
// only guard memory, and their text reads like Python's: "moeq::<op>: <argument> must ...".
#pragma once

#include <torch/headeronly/util/Exception.h>

#define MOEQ_CHECK(op, condition, ...) STD_TORCH_CHECK(condition, "moeq::", op, ": ", __VA_ARGS__)
