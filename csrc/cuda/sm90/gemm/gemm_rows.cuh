// The persistent kernel of gemm_kernel.cuh with adapters beside the weights: before a tile's end, its sums get a factor
// times what the adapter's other factor made of the tile's rows, by the tensor cores. The intermediate is written by
// slot, too. Of silu and swigluoai, nothing quantized.
#pragma once
#include "gemm_kernel.cuh"
#include "gemm_rows_variant.h"
#include "../problem/rows_problem.h"

namespace moeq::sm90 {

// A config of gemm_config.cuh whose tiles end as the functions below say.
template <class Base>
struct RowsConfig : Base {};

// 16 bytes, which nobody will read again here; `copy_wait` waits for all of this thread's.
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// A thread's eighth of a staged row of 64 values.
__device__ __forceinline__ uint32_t staged_piece(const Staging& s, int row, int piece) {
  return s.address + row * 128 + (piece ^ row % 8) * 16;
}

// A chunk of the ranks of a tile's rows into the staging, which is laid out as a step of tokens.
__device__ __forceinline__ void fetch_ranks(const RowsArgs& args, const Work& work, const Staging& s, int chunk) {
  constexpr int kValues = 2 * kRankChunk;
  const int piece = s.thread % 8;
  const __nv_bfloat16* low = args.low + chunk * kValues + piece * 8;
  const int64_t apart = int64_t{kValues} * rank_chunks(args.ranks);
#pragma unroll 4
  for (int row = s.thread / 8; row < work.rows; row += kRowsAPass) {
    copy16(staged_piece(s, row, piece), low + args.schedule.slot_of_row[work.first_row + row] * apart);
  }
}

template <class Base>
__device__ __forceinline__ void begin_finish(const GemmArgs& gemm, GemmShared<RowsConfig<Base>>&, const Work& work,
                                             const Staging& s) {
  const RowsArgs& args = static_cast<const RowsArgs&>(gemm);  // what rows_kernel was launched with
  if (args.low == nullptr) return;
  s.synchronize();  // nobody reads the staging any more
  fetch_ranks(args, work, s, 0);
}

// Two ranks of a row of the factor, k and on; zeros where there are none.
__device__ __forceinline__ uint32_t factor_word(const RowsArgs& args, const __nv_bfloat16* row, int k) {
  return row == nullptr || k >= args.ranks ? 0u : __ldg(reinterpret_cast<const unsigned int*>(row + k));
}

// A thread's share of 64 rows of a factor: the ranks of a chunk, twice. rows: the thread's two, null beyond the last.
__device__ __forceinline__ void factor_fragments(const RowsArgs& args, const __nv_bfloat16* (&rows)[2], int chunk,
                                                 int lane, uint32_t (&fragments)[4][4]) {
#pragma unroll
  for (int step = 0; step < kRankChunk / 16; step++) {
    const int k = chunk * kRankChunk + step * 16 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t word = factor_word(args, rows[i % 2], k + i / 2 * 8);
      fragments[step][i] = fragments[step + 2][i] = word;
    }
  }
}

// Adds the factor times the staged ranks to a tile's sums, which are in real units. row_of(m, half): the rows of the
// weights that a thread has of tile m, -1 beyond the last one. The staging is free afterwards.
template <class C, class RowOf>
__device__ __forceinline__ void add_ranks(const RowsArgs& args, const Work& work, Accumulators<C>& acc,
                                          const Staging& s, int rows_of_expert, RowOf row_of) {
  const __nv_bfloat16* factor = args.factor + int64_t{work.expert} * rows_of_expert * args.ranks;
  for (int chunk = 0; chunk < rank_chunks(args.ranks); chunk++) {
    if (chunk > 0) fetch_ranks(args, work, s, chunk);
    copy_wait();
    fence_async_proxy();
    s.synchronize();
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      const __nv_bfloat16* rows[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = row_of(m, half);
        rows[half] = row < 0 ? nullptr : factor + int64_t{row} * args.ranks;
      }
      uint32_t fragments[4][4];
      factor_fragments(args, rows, chunk, s.lane, fragments);
      multiply_step<C::kMaxWidth>(acc[m], fragments, s.address / 16 | 1 << 16, work.width / 8 - 1);
      wgmma_wait<0>();
      keep(fragments);
    }
    s.synchronize();
  }
}

// GEMM1's sums in real units, with their biases; rows beyond the last one come out as zeros.
template <class C>
__device__ __forceinline__ void scale_gated(const Problem& p, const Work& work, Accumulators<C>& acc,
                                            const Staging& s) {
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    const int i = (first_tile<C>(work, s) + m) * 32 + s.warp * 8 + s.lane / 4;
    RowScales scales;
    for (int half = 0; half < 2; half++) {
      scales.alpha[half] = i < p.inter ? s.alpha[half] : 0.0f;
      scales.bias[half] = 0.0f;
      if (p.w13_bias != nullptr && i < p.inter) {
        scales.bias[half] = p.w13_bias[(work.expert * int64_t{2} + half) * p.inter + i];
      }
    }
    transform<C>(work, acc[m], s, [&](float sum, int half, int) { return scales.of(sum, half, 1.0f); });
  }
}

template <class C, class Function>
__device__ __forceinline__ void activate_pairs(const Work& work, Accumulators<C>& acc, Function function) {
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
#pragma unroll
    for (int group = 0; group < C::kMaxWidth / 8; group++) {
      if (group * 8 >= work.width) break;
#pragma unroll
      for (int b = 0; b < 2; b++) {
        acc[m][group * 4 + b] = function(acc[m][group * 4 + b], acc[m][group * 4 + 2 + b]);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void store_by_slot(const RowsArgs& args, const Work& work, const Staging& s, int column) {
  const int piece = s.thread % 8, inter = args.problem.inter;
  if (piece * 8 >= Sizes<C>::kGatedColumns || column + piece * 8 >= inter) return;
#pragma unroll 4
  for (int row = s.thread / 8; row < work.rows; row += kRowsAPass) {
    const int64_t slot = args.schedule.slot_of_row[work.first_row + row];
    *reinterpret_cast<uint4*>(args.hidden_rows + slot * inter + column + piece * 8) =
        load_shared16(staged_piece(s, row, piece));
  }
}

// `consume` finds these by `shared`: more special than those of gemm_finish_gated.cuh and gemm_finish_second.cuh.
template <class C, Finish finish, class Base>
__device__ __forceinline__ void finish_gated(const GemmArgs& gemm, GemmShared<RowsConfig<Base>>&, const Work& work,
                                             Accumulators<RowsConfig<Base>>& acc, const Staging& s) {
  static_assert(finish == Finish::kSwiglu);
  const RowsArgs& args = static_cast<const RowsArgs&>(gemm);
  const Problem& p = args.problem;
  const int first = first_tile<C>(work, s), inter = p.inter;
  scale_gated<C>(p, work, acc, s);
  if (args.low != nullptr) {
    add_ranks<C>(args, work, acc, s, 2 * inter, [&](int m, int half) {
      const int i = (first + m) * 32 + s.warp * 8 + s.lane / 4;
      return i < inter ? half * inter + i : -1;
    });
  } else {
    s.synchronize();  // nobody reads the staging any more
  }
  if (p.alpha == 1.0f && p.beta == 0.0f && p.limit == INFINITY) {
    activate_pairs<C>(work, acc, [](float gate, float up) { return silu(gate) * up; });
  } else {
    activate_pairs<C>(work, acc, [&](float gate, float up) { return swiglu(p, gate, up); });
  }
  stage_gated<C>(work, acc, s);
  s.synchronize();
  store_intermediate<C, Sizes<C>::kGatedColumns>(args, work, s, first * 32);
  if (args.hidden_rows != nullptr) store_by_slot<C>(args, work, s, first * 32);
}

template <class C, class Base>
__device__ __forceinline__ void finish_second(const GemmArgs& gemm, GemmShared<RowsConfig<Base>>&, const Work& work,
                                              Accumulators<RowsConfig<Base>>& acc, const Staging& s, const int* slots) {
  const RowsArgs& args = static_cast<const RowsArgs&>(gemm);
  const int first = first_tile<C>(work, s), hidden = args.problem.hidden;
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    const RowScales scales = scales_of_second<typename C::Format>(args, work, s, (first + m) * kTileRows);
    transform<C>(work, acc[m], s, [&](float sum, int half, int) { return scales.of(sum, half, 1.0f); });
  }
  if (args.low != nullptr) {
    add_ranks<C>(args, work, acc, s, hidden, [&](int m, int half) {
      const int row = (first + m) * kTileRows + s.warp * 16 + half * 8 + s.lane / 4;
      return row < hidden ? row : -1;
    });
  }
  copy_wait();  // for prefetch_slots, which the first synchronization below makes known to all
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    s.synchronize();  // nobody reads the staging any more
    stage_tile<C>(work, acc[m], s);
    s.synchronize();
    store_output<C>(args, work, s, (first + m) * kTileRows, slots);
  }
}

template <class C>
__global__ void __launch_bounds__(Sizes<C>::kThreads, C::kBlocks) rows_kernel(const __grid_constant__ RowsArgs args) {
  run_block<C, Finish::kSwiglu>(args, args);
}

template <class Format, bool wide>
RowsVariant rows_variant() {
  using C = RowsConfig<std::conditional_t<wide, WideConfig<Format>, NarrowConfig<Format>>>;
  static_assert(C::kBlocks == 1);
  return {rows_kernel<C>, sizeof(GemmShared<C>) + 1024, Sizes<C>::kThreads, Sizes<C>::kBlockTiles, C::kMaxWidth};
}

}  // namespace moeq::sm90
