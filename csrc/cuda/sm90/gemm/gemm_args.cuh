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
  const float* h_factor;  // [rows]; null: 1
  void* y;  // [slots, hidden] by slot: bfloat16, or float32 if y_wide
  bool y_wide;
  int rows;  // max_rows
  int hidden_padded, inter_padded;
  int tiles13, tiles2;  // of 64 rows, an expert
  int blocks13, blocks2;  // of as many tiles as a thread block multiplies at a time
  bool first, second;  // which of the GEMMs to do
  bool mx;  // the intermediate is rounded to mxfp8
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
  int arrivals;  // in `finished` that mark the end of the expert's GEMM1
};

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
  const TokenTile tile = args.schedule.tiles[some.first + within % some.tiles];
  work.expert = tile.expert;
  work.row_block = within / tile.tiles;
  work.rows = tile.rows;
  work.width = tile.width;
  work.first_row = tile.start;
  work.k_tiles = (work.second ? args.inter_padded : args.hidden_padded) / kTileK;
  work.arrivals = args.first ? tile.tiles * args.blocks13 : 0;
  return work;
}

}  // namespace moeq::sm90
