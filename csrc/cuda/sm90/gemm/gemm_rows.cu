// The persistent kernel of gemm_kernel.cuh for one GEMM, with adapters beside the weights: before a tile's end, its
// sums get a factor times what the adapter's other factor made of the tile's rows, by the tensor cores. The
// intermediate is written by slot, too. Of silu and swigluoai, nothing quantized.
//
// A tile's end is what nothing else hides, so that all it reads is in shared memory by then: ranks come by a warp of
// their own, each thread's words of the factor and the slots of rows by copies begun before the multiplication.
#include <cstddef>

#include "gemm_args.cuh"
#include "gemm_kernel.cuh"
#include "../device/wgmma_bf16.cuh"
#include "../problem/tiled_problem.h"

namespace moeq::sm90 {

constexpr int kRankRowBytes = 2 * kRankChunk * sizeof(__nv_bfloat16);  // of a slot and chunk
static_assert(kRankRowBytes == 64, "what multiply_ranks takes");

// What another kernel has its `blocks` for holds a chunk of the ranks of a tile's rows, which all warpgroups multiply.
template <class C>
struct RowsShared : GemmShared<C> {
  uint64_t ranks_full, ranks_empty;

  __device__ uint32_t ranks() { return shared_address(this->blocks); }
};

template <class C>
struct RowsSizes {
  static_assert(offsetof(GemmShared<C>, blocks) % 512 == 0, "the swizzle's atom");
  static_assert(sizeof(GemmShared<C>::blocks) >= C::kMaxWidth * kRankRowBytes);
  static constexpr int kChunkWords = C::kWarpgroupTiles * 128 * 16;  // bytes of a warpgroup's words of the factor
  static constexpr int kStagedChunks = C::kMaxWidth * 128 / kChunkWords;  // so many the staging holds
};

// 16 bytes, which nobody will read again here; `copy_wait` waits for all of this thread's.
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 4 bytes, or zeros if they are not `real`.
__device__ __forceinline__ void copy4_or_zero(uint32_t to, const void* from, bool real) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(real ? 4 : 0) : "memory");
}

// A chunk of the ranks of a tile's rows, by a warp: a lane copies a quarter of a row.
template <class C>
__device__ __forceinline__ void fetch_ranks(const __nv_bfloat16* low, int apart, const int* slots, int rows,
                                            uint32_t to, int lane) {
#pragma unroll(C::kProducerRegisters > 32 ? 3 : 1)
  for (int row = lane / 4; row < rows; row += 8) {
    copy16(to + row * kRankRowBytes + (lane ^ row / 2) % 4 * 16, low + int64_t{slots[row]} * apart);
  }
}

// By a warp, for all tiles.
template <class C>
__device__ __forceinline__ void load_ranks(const RowsArgs& args, RowsShared<C>& shared, int lane) {
  Ring<kWorkSlots> work_ring;
  Ring<1> ring;
  while (true) {
    const Work work = wait_for_work(shared, work_ring);
    __syncwarp();
    const uint32_t read = once_loaded(shared_address(&shared.work_empty[work_ring.slot]), work.expert | work.rows);
    if (lane == 0) barrier_arrive(read);
    work_ring.advance();
    if (work.expert < 0) return;
    const int chunks = rank_chunks(args.ranks), apart = chunks * 2 * kRankChunk;
    for (int chunk = 0; args.low != nullptr && chunk < chunks; chunk++) {
      barrier_wait(shared_address(&shared.ranks_empty), ring.parity ^ 1);
      fetch_ranks<C>(args.low + chunk * 2 * kRankChunk + lane % 4 * 8, apart,
                     args.schedule.slot_of_row + work.first_row, work.rows, shared.ranks(), lane);
      copy_wait();
      fence_async_proxy();
      barrier_arrive(shared_address(&shared.ranks_full));
      ring.advance();
    }
  }
}

// Where a thread's words of its warpgroup's tile m lie, of one of the chunks in the staging.
template <class C>
__device__ __forceinline__ uint32_t staged_words(const Staging& s, int chunk, int m) {
  return s.address + chunk * RowsSizes<C>::kChunkWords + (m * 128 + s.thread) * 16;
}

// The row of the weights that a thread has in tile m, its first or second one; -1 beyond the last.
template <class C>
__device__ __forceinline__ int factor_row(const Problem& p, const Work& work, const Staging& s, int m, int half) {
  const int tile = first_tile<C>(work, s) + m;
  if (work.second) {
    const int row = tile * kTileRows + s.warp * 16 + half * 8 + s.lane / 4;
    return row < p.hidden ? row : -1;
  }
  const int i = tile * 32 + s.warp * 8 + s.lane / 4;
  return i < p.inter ? half * p.inter + i : -1;
}

// A thread's own words of the factor, of `first` and the following chunks, into the staging, which nobody else reads.
template <class C>
__device__ __forceinline__ void fetch_factor(const RowsArgs& args, const Work& work, const Staging& s, int first) {
  const Problem& p = args.problem;
  const int rows = work.second ? p.hidden : 2 * p.inter;
  const __nv_bfloat16* factor = args.factor + int64_t{work.expert} * rows * args.ranks;
  const int chunks = min(rank_chunks(args.ranks) - first, RowsSizes<C>::kStagedChunks);
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = factor_row<C>(p, work, s, m, half);
      const __nv_bfloat16* of_row = factor + int64_t{max(row, 0)} * args.ranks;
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; chunk++) {
        const uint32_t to = staged_words<C>(s, chunk, m) + half * 4;
        const int k = (first + chunk) * kRankChunk + s.lane % 4 * 2;
        const bool real = row >= 0, upper = real && k + 8 < args.ranks;
        copy4_or_zero(to, of_row + k, real);
        copy4_or_zero(to + 8, upper ? of_row + k + 8 : of_row, upper);
      }
    }
  }
}

// Adds the factor times the tile's ranks to its sums, which are in real units.
template <class C>
__device__ __forceinline__ void add_ranks(const RowsArgs& args, RowsShared<C>& shared, const Work& work,
                                          Accumulators<C>& acc, const Staging& s, Ring<1>& ring) {
  for (int chunk = 0; chunk < rank_chunks(args.ranks); chunk++) {
    const int staged = chunk % RowsSizes<C>::kStagedChunks;
    if (staged == 0 && chunk > 0) fetch_factor<C>(args, work, s, chunk);
    if (staged == 0) copy_wait();
    barrier_wait(shared_address(&shared.ranks_full), ring.parity);
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      const uint4 words = load_shared16(staged_words<C>(s, staged, m));
      const uint32_t fragments[4] = {words.x, words.y, words.z, words.w};
      multiply_ranks<C::kMaxWidth>(acc[m], fragments, shared.ranks() / 16 | 1 << 16, work.width / 8 - 1);
    }
    __syncwarp();
    arrive_once_a_warp(shared_address(&shared.ranks_empty), s.lane);
    ring.advance();
  }
}

// GEMM1's sums in real units, with their biases; rows beyond the last one come out as zeros.
template <class C>
__device__ __forceinline__ void scale_gated(const Problem& p, const Work& work, Accumulators<C>& acc,
                                            const Staging& s) {
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    const RowScales scales = scales_of_gated<C>(p, work, s, m);
    transform<C>(work, acc[m], s, [&](float sum, int half, int) { return scales.of(sum, half, 1.0f); });
  }
}

template <class C>
__device__ __forceinline__ void scale_second(const RowsArgs& args, const Work& work, Accumulators<C>& acc,
                                             const Staging& s) {
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    const RowScales scales = scales_of_second(args.problem, work, s, m);
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
__device__ __forceinline__ void activate_rows(const Problem& p, const Work& work, Accumulators<C>& acc) {
  if (p.alpha == 1.0f && p.beta == 0.0f && p.limit == INFINITY) {
    activate_pairs<C>(work, acc, [](float gate, float up) { return silu(gate) * up; });
  } else {
    activate_pairs<C>(work, acc, [&](float gate, float up) { return swiglu(p, gate, up); });
  }
}

template <class C>
__device__ __forceinline__ void store_by_slot(const RowsArgs& args, const Work& work, const Staging& s, int column,
                                              const int* slots) {
  const int piece = s.thread % 8, inter = args.problem.inter;
  if (piece * 8 >= Sizes<C>::kGatedColumns || column + piece * 8 >= inter) return;
  __nv_bfloat16* to = args.hidden_rows + column + piece * 8;
#pragma unroll
  for (int i = 0; i < (C::kMaxWidth + kRowsAPass - 1) / kRowsAPass; i++) {
    const int row = s.thread / 8 + i * kRowsAPass;
    if (row >= work.rows) break;
    const uint4 v = load_shared16(s.address + row * 128 + (piece ^ row % 8) * 16);
    *reinterpret_cast<uint4*>(to + static_cast<int64_t>(slots[row]) * inter) = v;
  }
}

// The sums in real units, their slots in shared memory; the staging is free.
template <class C>
__device__ __forceinline__ void store_rows(const RowsArgs& args, const Work& work, Accumulators<C>& acc,
                                           const Staging& s, const int* slots) {
  const int first = first_tile<C>(work, s);
  if (work.second) {
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      if (m > 0) s.synchronize();  // nobody reads the staging any more
      stage_tile<C>(work, acc[m], s);
      s.synchronize();
      store_output<C>(args, work, s, (first + m) * kTileRows, slots);
    }
    return;
  }
  activate_rows<C>(args.problem, work, acc);
  stage_gated<C>(work, acc, s);
  s.synchronize();
  store_intermediate<C, Sizes<C>::kGatedColumns>(args, work, s, first * 32);
  if (args.hidden_rows != nullptr) store_by_slot<C>(args, work, s, first * 32, slots);
}

// What a tile's end needs, asked for before the multiplication.
template <class C>
__device__ __forceinline__ void begin_rows(const RowsArgs& args, const Work& work, const Staging& s, int* slots) {
  prefetch_slots(args, work, s, slots);
  prefetch_biases<C>(args.problem, work, s);
  if (args.low == nullptr) return;
  s.synchronize();  // nobody reads the staging any more
  fetch_factor<C>(args, work, s, 0);
}

template <class C>
__device__ __forceinline__ void finish_rows(const RowsArgs& args, RowsShared<C>& shared, const Work& work,
                                            Accumulators<C>& acc, const Staging& s, Ring<1>& ranks, const int* slots) {
  if (biases_of(args.problem, work) != nullptr) {
    copy_wait();
    s.synchronize();
  }
  if (work.second) {
    scale_second<C>(args, work, acc, s);
  } else {
    scale_gated<C>(args.problem, work, acc, s);
  }
  if (args.low != nullptr) add_ranks<C>(args, shared, work, acc, s, ranks);
  copy_wait();  // for prefetch_slots, which this synchronization makes known to all
  s.synchronize();  // nor are there words of the factor in the staging, or rows of the tile before
  store_rows<C>(args, work, acc, s, slots);
}

template <class C>
__device__ __forceinline__ void consume_rows(const RowsArgs& args, RowsShared<C>& shared) {
  Ring<1> ranks;
  consume<C>(
      args, shared,
      [&](const Work& work, Staging& staging, int* slots, int) { begin_rows<C>(args, work, staging, slots); },
      [&](const Work& work, Accumulators<C>& acc, const Staging& staging, int* slots, int) {
        finish_rows<C>(args, shared, work, acc, staging, ranks, slots);
      });
}

template <class C>
__global__ void __launch_bounds__(Sizes<C>::kThreads, C::kBlocks) rows_kernel(const __grid_constant__ RowsArgs args) {
  run_block<C, RowsShared<C>>(
      args, args,
      [](auto& shared) {
        barrier_init(shared_address(&shared.ranks_full), 32);
        barrier_init(shared_address(&shared.ranks_empty), 4 * C::kConsumers);
      },
      [&](auto& shared) {
        if (blockIdx.x == 0 && args.next_of_second != nullptr) *args.next_of_second = 0;
        find_all_work<C>(args, shared);
      },
      [&](auto& shared, int thread) {
        if (thread >= 96) load_ranks<C>(args, shared, thread - 96);
      },
      [&](auto& shared) { consume_rows<C>(args, shared); });
}

template <class Format, Shape shape>
RowsVariant rows_variant() {
  using Fewer = std::conditional_t<shape == Shape::kSlim, SlimConfig<Format>, NarrowConfig<Format>>;
  using C = std::conditional_t<shape == Shape::kWide, WideConfig<Format>, Fewer>;
  return variant_of<C, RowsShared<C>>(rows_kernel<C>);
}

template RowsVariant rows_variant<Nvfp4Format, Shape::kSlim>();
template RowsVariant rows_variant<Nvfp4Format, Shape::kNarrow>();
template RowsVariant rows_variant<Nvfp4Format, Shape::kWide>();

template RowsVariant rows_variant<Mxfp4Format, Shape::kSlim>();
template RowsVariant rows_variant<Mxfp4Format, Shape::kNarrow>();
template RowsVariant rows_variant<Mxfp4Format, Shape::kWide>();
}  // namespace moeq::sm90
