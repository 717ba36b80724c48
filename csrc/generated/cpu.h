// Of the CPU kernels. Written by scripts/kernel_headers.py: change what it reads, not this.
#pragma once
#include "../names.h"

namespace moeq::cpu {

// Output rows that one vector register holds.
constexpr int kPanelRows = 16;
// Elements of K that a decoder handles at once.
constexpr int kUnit = 16;
// Rows, and values of K, that share a scale of fp8_block.
constexpr int kTile = 128;

enum class Scheme : int { kNone, kNvfp4, kMxfp4, kMxfp8, kMxint4, kInt4, kFp8, kFp8Block, kInt8, kMxfp6 };

enum class ActFormat : int { kNone, kNvfp4, kMxfp4, kMxfp8, kMxfp6E3m2, kMxfp6E2m3, kFp8, kInt8 };

// How the layout stores a scheme.
struct SchemeLayout {
  int unit_bytes;         // of sixteen rows; 0: as the dtype says
  int group_units;        // that share a block scale; 0: as the scales say
  int group_scale_bytes;  // of a group of a panel; where the scales say their dtype, elements; 0: no scales
  int scale_panels;       // that share a row of scales
  int fp8_group;          // values of K that share a scale of fp8 activations; 0: a row
};

// By scheme.
constexpr SchemeLayout kSchemeLayouts[] = {
    {0, 0, 0, 1, 0},
    {128, 1, 16, 1, 0},
    {128, 2, 16, 1, 0},
    {256, 2, 16, 1, 0},
    {128, 2, 32, 1, 0},
    {128, 0, 16, 1, 0},
    {256, 0, 16, 1, 0},
    {256, 8, 4, 8, 128},
    {256, 0, 16, 1, 0},
    {256, 2, 16, 1, 0},
};

constexpr SchemeLayout layout_of(Scheme scheme) { return kSchemeLayouts[static_cast<int>(scheme)]; }

// How packed hidden states are stored.
struct ActLayout {
  int pack;         // codes of a byte; 0: none are taken
  int block;        // values of K that share a scale; 0: a row
  int scale_bytes;  // of each
};

// By format.
constexpr ActLayout kActLayouts[] = {
    {0, 0, 0},
    {2, 16, 1},
    {2, 32, 1},
    {1, 32, 1},
    {0, 0, 0},
    {0, 0, 0},
    {1, 0, 4},
    {1, 0, 4},
};

}  // namespace moeq::cpu

namespace moeq {

template <>
struct Names<cpu::Scheme> {
  static constexpr const char* kAll[] = {
      "none", "nvfp4", "mxfp4", "mxfp8", "mxint4", "int4", "fp8", "fp8_block", "int8", "mxfp6"
  };
};

template <>
struct Names<cpu::ActFormat> {
  static constexpr const char* kAll[] = {"none", "nvfp4", "mxfp4", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "fp8", "int8"};
};

}  // namespace moeq
