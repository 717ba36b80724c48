// Products of integers (int4, mxint4 and int8 weights with int8 activations, NVFP4 or MXFP4 both): one function per
// instruction set that has them, all with the same bits, and the choice at run time.
#pragma once

#include <string>

#include "isa.h"

namespace moeq::cpu {

Dot portable_integer_dot(const DotKey& key);
Dot avx2_integer_dot(const DotKey& key);
Dot avxvnni_integer_dot(const DotKey& key);
Dot avx512_integer_dot(const DotKey& key);
Dot avx512vnni_integer_dot(const DotKey& key);
Dot amx_integer_dot(const DotKey& key);
bool amx_multiplies_bytes();  // as it should; only where the processor and the system have AMX-INT8
Dot amx_emulated_integer_dot(const DotKey& key);

// How a layer multiplies: where weights and activations are integers, or small floats that are taken as such, by the
// best instructions that `table` may use, or by those that were asked for; else as `table` does.
Dot find_dot(const DotKey& key, const IsaTable& table);

// The name of those.
std::string integer_isa(const IsaTable& table);

// For tests that compare them in one process; "" is the choice by the machine. Throws std::runtime_error where the name
// is unknown or the machine lacks it.
void use_integer_isa(const std::string& name);

}  // namespace moeq::cpu
