// The end of GEMM2: one row of the result for each slot.
#pragma once
#include "gemm_staging.cuh"

namespace moeq::sm90 {

// A thread's 16 bytes of the staged 64 results of its rows.
template <class C>
__device__ __forceinline__ void store_output(const GemmArgs& args, const Work& work, const Staging& s, int first_row,
                                             const int* slots) {
  const int hidden = args.problem.hidden, at = first_row + s.thread % 8 * 8;
  if (at >= hidden) return;
  __nv_bfloat16* y = static_cast<__nv_bfloat16*>(args.y) + at;
#pragma unroll
  for (int i = 0; i < (C::kMaxWidth + kRowsAPass - 1) / kRowsAPass; i++) {
    const int row = s.thread / 8 + i * kRowsAPass;
    if (row >= work.rows) break;
    const uint4 v = load_shared16(s.address + row * 128 + (s.thread % 8 ^ row % 8) * 16);
    *reinterpret_cast<uint4*>(y + static_cast<int64_t>(slots[row]) * hidden) = v;
  }
}

template <class C>
__device__ __forceinline__ void store_output_wide(const GemmArgs& args, const Work& work, const TileSums<C>& acc,
                                                  const Staging& s, int first_row) {
  const int hidden = args.problem.hidden;
  store_wide<C>(acc, s, hidden - first_row, [&](int token) {
    if (token >= work.rows) return static_cast<float*>(nullptr);
    const int64_t slot = args.schedule.slot_of_row[work.first_row + token];
    return static_cast<float*>(args.y) + slot * hidden + first_row;
  });
}

template <class Format>
__device__ __forceinline__ RowScales scales_of_second(const GemmArgs& args, const Work& work, const Staging& s,
                                                      int first_row) {
  const Problem& p = args.problem;
  RowScales scales;
  for (int half = 0; half < 2; half++) {
    const int row = first_row + row_in_tile<Format>(s, half);
    scales.alpha[half] = s.alpha[0];
    scales.bias[half] = 0.0f;
    if (p.w2_bias != nullptr && row < p.hidden) scales.bias[half] = p.w2_bias[work.expert * int64_t{p.hidden} + row];
  }
  return scales;
}

// Begun before the multiplication, so that nobody waits for memory after it.
__device__ __forceinline__ void prefetch_slots(const GemmArgs& args, const Work& work, const Staging& s, int* slots) {
  for (int row = s.thread; row < work.rows; row += 128) {
    copy4(shared_address(slots + row), args.schedule.slot_of_row + work.first_row + row);
  }
}

template <class C>
__device__ __forceinline__ void finish_second(const GemmArgs& args, GemmShared<C>&, const Work& work,
                                              Accumulators<C>& acc, const Staging& s, const int* slots) {
  copy_wait();   // for prefetch_slots, which the first synchronization below makes known to all
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    s.synchronize();   // nobody reads the staging any more
    const int first = (first_tile<C>(work, s) + m) * kTileRows;
    const RowScales scales = scales_of_second<typename C::Format>(args, work, s, first);
    if (args.h_factor == nullptr) {
      transform<C>(work, acc[m], s, [&](float sum, int half, int) { return scales.of(sum, half, 1.0f); });
    } else {
      stage_factors(work, s, [&](int row) { return args.h_factor[row]; });
      transform<C>(work, acc[m], s,
                   [&](float sum, int half, int token) { return scales.of(sum, half, factor_of<true>(s, token)); });
      s.synchronize();
    }
    if (args.y_wide) {
      store_output_wide<C>(args, work, acc[m], s, first);
      continue;
    }
    stage_tile<C>(work, acc[m], s);
    s.synchronize();
    store_output<C>(args, work, s, first, slots);
  }
}

}  // namespace moeq::sm90
