// What the persistent kernel of both GEMMs reads and writes, and the order in which it does.
#pragma once
#include <cuda_bf16.h>

#include "gemm_config.cuh"
#include "../problem/problem.h"
#include "../prefill/schedule.cuh"

namespace moeq::sm90 {

struct GemmArgs {
  Problem problem;
  Schedule schedule;
  const __nv_bfloat16* operand;  // [hidden_padded / 64, rows, 64]
  const float* operand_factor;   // [tokens]; null: 1
  __nv_bfloat16* h;              // [inter_padded / 64, rows, 64], likewise
  float* h_wide;  // [rows, inter_padded] in natural order, where quantization needs whole rows; or null
  float* h_factor;  // [rows]; null: 1
  void* y;  // [slots, hidden] by slot: bfloat16, or float32 if y_wide
  bool y_wide;
  int rows;  // max_rows
  int hidden_padded, inter_padded;
  int tiles13, tiles2;  // of 64 rows, an expert
  int blocks13, blocks2;  // of as many tiles as a thread block multiplies at a time
  bool first, second;  // which of the GEMMs to do
  bool mx;  // the intermediate is rounded to mxfp8
  // Of kernels that round the intermediate row by row (RoundsRows), and those in front of them; the others get nulls.
  const float* row_factor;  // [rows]: the same by row; null: operand_factor
  uint32_t* row_amax;  // [rows]: largest magnitudes of the intermediate, as bits, whose rows are rounded to e4m3, in
                       // this launch if it does both GEMMs; h_wide lies as e4m3_rows.cuh says then. Null: the kernels
                       // that know nothing of that (RoundsRows)
  const float* given_gscale;  // by which rows are rounded then; null: by their largest magnitudes
  bool gscale_by_expert;
  Rounded rounded;
};

// A tile of tokens times a block of weight rows. GEMM2's wait until their expert's GEMM1 is finished: they come after
// all of GEMM1's, which wait for nothing, so that someone always works.
struct Work {
  int expert;  // -1: no more work
  int second;  // GEMM2
  int row_block;
  int width;  // tokens, a multiple of 8
  int rows;  // of them real
  int first_row;  // a multiple of 8
  int k_tiles;
  int arrivals;  // in `finished` that mark the end of the expert's GEMM1; or the tile of tokens (find_work)
};

// Rows of the intermediate are rounded in units: eight of them, so many steps of K.
constexpr int kUnitRows = 8, kUnitSteps = 6;
__device__ __forceinline__ int units_of_rows(const GemmArgs& args) {
  return (args.inter_padded / kTileK + kUnitSteps - 1) / kUnitSteps;
}

// kTellsTile: `arrivals` is the tile's number.
template <bool kTellsTile>
__device__ __forceinline__ Work find_work(const GemmArgs& args, int tiles_total, int item) {
  Work work{-1, 0, 0, 0, 0, 0, 0, 0};
  const int items13 = args.first ? tiles_total * args.blocks13 : 0;
  work.second = item >= items13;
  const int blocks = work.second ? args.blocks2 : args.blocks13;
  const int local = work.second ? item - items13 : item;
  if (work.second && (!args.second || local >= tiles_total * blocks)) return work;
  // Items of an expert: for each block of weight rows one after another all its tiles, so that weights come from the
  // cache from the second tile on.
  const TokenTile some = args.schedule.tiles[local / blocks];  // of the expert
  const int within = local - some.first * blocks;
  const int number = some.first + within % some.tiles;
  const TokenTile tile = args.schedule.tiles[number];
  work.expert = tile.expert;
  work.row_block = within / tile.tiles;
  work.rows = tile.rows;
  work.width = tile.width;
  work.first_row = tile.start;
  work.k_tiles = (work.second ? args.inter_padded : args.hidden_padded) / kTileK;
  work.arrivals = kTellsTile ? number : args.first ? tile.tiles * args.blocks13 : 0;
  return work;
}

}  // namespace moeq::sm90
