// The table of one instruction set; each isa_*.cpp includes this with its own flags and namespace.
#pragma once

#include "epilogue.h"
#include "load_rows.h"
#include "quantize.h"
#include "weights.h"

namespace moeq::cpu::MOEQ_ISA {

inline IsaTable make_table(const char* name) {
  return {name, kTile, find_dot, load_row, load_packed_row, quantize_row, glu, scale, combine};
}

}  // namespace moeq::cpu::MOEQ_ISA
