// The routed experts of one layer, on any instruction set.
#pragma once

#include "isa.h"
#include "parallel.h"

namespace moeq::cpu {

// Throws std::bad_alloc; everything else was checked before.
void run_experts(const ExpertsArgs& args, const IsaTable& isa, const Dot& dot, const Parallel& parallel);

}  // namespace moeq::cpu
