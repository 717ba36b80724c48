// Which instruction set runs.
#pragma once

#include <string>

#include "isa.h"

namespace moeq::cpu {

// The table in use: the best that this machine has, or what MOEQ_CPU_ISA asks for (read once).
// Throws std::runtime_error where that name is unknown or the machine lacks it.
const IsaTable& isa_table();

// Replaces it; for tests that compare instruction sets in one process.
void use_isa(const std::string& name);

// Why this machine cannot run an instruction set; empty where it can.
std::string isa_refusal(const std::string& name);

}  // namespace moeq::cpu
