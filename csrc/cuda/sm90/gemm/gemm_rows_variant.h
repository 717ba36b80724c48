// The persistent kernels of one GEMM at a time, with adapters beside the weights (problem/tiled_problem.h).
#pragma once
#include "gemm_variant.h"

namespace moeq::sm90 {

struct RowsArgs : GemmArgs {
  const __nv_bfloat16* low;      // [slots, rank_chunks(ranks), 2, kRankChunk]; null: no adapters
  const __nv_bfloat16* factor;   // [experts, rows of the weights, ranks]
  int ranks;                     // a multiple of 8
  __nv_bfloat16* hidden_rows;    // [slots, inter] by slot: the intermediate; null: h alone
  int* next_of_second;           // the schedule's next_item of the launch of GEMM2, which GEMM1's sets to 0; or null
};

struct RowsVariant {
  void (*kernel)(RowsArgs);
  int shared_bytes;
  int threads;
  int blocks;        // of a multiprocessor
  int block_tiles;   // of 64 weight rows that a thread block multiplies at a time
  int max_width;     // tokens of a tile
};

template <class Format, Shape shape>
RowsVariant rows_variant();

}  // namespace moeq::sm90
