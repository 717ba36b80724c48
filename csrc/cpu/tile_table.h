// The table of an instruction set with tiles: that of another one, which serves what tiles do not take.
#pragma once

#include "weights.h"

namespace moeq::cpu::MOEQ_ISA {

inline Dot find_tile_dot(const DotKey& key, const IsaTable& base) {
  const Dot tiles = find_dot(key);
  return tiles.tile == nullptr ? base.find_dot(key) : tiles;
}

inline IsaTable make_tile_table(const char* name, const IsaTable& base, Dot (*find)(const DotKey&)) {
  IsaTable table = base;
  table.name = name;
  table.find_dot = find;
  return table;
}

}  // namespace moeq::cpu::MOEQ_ISA
