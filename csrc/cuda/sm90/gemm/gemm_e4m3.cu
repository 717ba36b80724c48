// The persistent kernel of gemm_kernel.cuh where GEMM1 rounds the intermediate to e4m3 with a scale of each row, of
// which no thread block has more than a part. Blocks that have parts of the same rows keep their sums until all of them
// have sent what their largest magnitudes are, and round them where they are. Of silu and swigluoai.
//
// They are a gang: as many blocks as GEMM1 has blocks of weight rows, each of which multiplies its own one of every
// tile of tokens that the gang takes. So they have the same work at the same time, and who waits, waits for blocks of
// its gang alone, which is why the launch begins as a whole. Blocks beyond the last gang begin with GEMM2.
#include <climits>

#include "../prefill/prefill_plan.h"
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
namespace {

constexpr uint32_t kSent = 1u << 31;  // of a magnitude that is there: it has no sign

__device__ __forceinline__ void send_word(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ uint4 look_at_four(const uint32_t* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ bool are_sent(const uint4& four) { return (four.x & four.y & four.z & four.w & kSent) != 0; }

__device__ __forceinline__ void raise_shared(uint32_t at, uint32_t word) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

// After each look in vain: whether others follow. A wait that is too long ends all waits of the grid, as that of
// wait_for_intermediate.
__device__ __forceinline__ bool check_wait(const GemmArgs& args, BoundedWait& wait) {
  if (wait.is_over()) *args.schedule.overdue = 1;
  return !wait.rests() || load_acquire(args.schedule.overdue) == 0;
}

// A block's place among those that have parts of the same rows.
struct Member {
  int gangs, gang, number;

  __device__ __forceinline__ explicit Member(const GemmArgs& args)
      : gangs(static_cast<int>(gridDim.x) / args.blocks13),
        gang(static_cast<int>(blockIdx.x) / args.blocks13),
        number(static_cast<int>(blockIdx.x) - gang * args.blocks13) {}
};

// The tile of tokens that a gang takes in this round, not the first one: its first block takes it and tells the others,
// in one of the places that take turns. It is in no round before all have sent their maxima of the one before the last.
__device__ __forceinline__ int next_tile(const RoundingArgs& args, const Member& member, int round) {
  uint64_t* told = args.turns->told[member.gang] + round % kGangTurns;
  if (member.number == 0) {
    const int tile = member.gangs + atomicAdd(&args.turns->next_tile, 1);
    const uint64_t word = static_cast<uint64_t>(round) << 32 | static_cast<uint32_t>(tile);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(told), "l"(word) : "memory");
    return tile;
  }
  uint64_t word = 0;
  BoundedWait wait;
  while (true) {
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(told) : "memory");
    if (word >> 32 == round) return static_cast<int>(word);
    if (!check_wait(args, wait)) return INT_MAX;  // none
  }
}

__device__ __forceinline__ Work work_of_member(const GemmArgs& args, int tile, int number) {
  const TokenTile tokens = args.schedule.tiles[tile];
  return {tokens.expert, 0, number, tokens.width, tokens.rows, tokens.start, args.hidden_padded / kTileK, 0};
}

// find_all_work where GEMM1's is a gang's.
template <class C>
__device__ __forceinline__ void find_all_of_gang(const RoundingArgs& args, GemmShared<C>& shared) {
  const int tiles_total = *args.schedule.tiles_total, items13 = tiles_total * args.blocks13;
  const Member member(args);
  Ring<kWorkSlots> ring;
  uint32_t wanted_parity = 0;
  int tile = member.gang < member.gangs ? member.gang : tiles_total;
  for (int round = 1;; round++) {
    const Work work = tile < tiles_total
                          ? work_of_member(args, tile, member.number)
                          : find_work(args, tiles_total, items13 + atomicAdd(args.schedule.next_item, 1));
    barrier_wait(shared_address(&shared.work_empty[ring.slot]), ring.parity ^ 1);
    shared.work[ring.slot] = work;
    barrier_arrive(shared_address(&shared.work_full[ring.slot]));
    if (work.expert < 0) return;
    ring.advance();
    barrier_wait(shared_address(&shared.work_wanted), wanted_parity);
    wanted_parity ^= 1;
    if (tile < tiles_total) tile = next_tile(args, member, round);
  }
}

// All warpgroups that multiply.
template <class C>
__device__ __forceinline__ void sync_block() {
  named_barrier(1 + C::kConsumers, 128 * C::kConsumers);
}

// What lies where other kernels have their `blocks`: largest magnitudes of each token, of the block's rows and of all,
// of this tile and of the next.
template <class C>
struct BlockMaxima {
  uint32_t of_block[C::kMaxWidth], of_row[C::kMaxWidth];
};

template <class C>
__device__ __forceinline__ BlockMaxima<C>* block_maxima(GemmShared<C>& shared) {
  static_assert(2 * sizeof(BlockMaxima<C>) <= sizeof(shared.blocks), "there is room");
  return reinterpret_cast<BlockMaxima<C>*>(shared.blocks);
}

template <class C>
__device__ __forceinline__ void clear_maxima(BlockMaxima<C>& maxima) {
  if (threadIdx.x < C::kMaxWidth) maxima.of_block[threadIdx.x] = maxima.of_row[threadIdx.x] = 0;
}

// What the staging of a warpgroup holds meanwhile, of each token: its warps' largest magnitudes, then how its row is
// rounded.
template <class C>
struct RowPlaces {
  const Staging& s;

  __device__ __forceinline__ uint32_t of_warp(int warp, int token) const {
    return s.address + (warp * C::kMaxWidth + token) * 4;
  }
  __device__ __forceinline__ uint32_t divisor(int token) const { return s.address + token * 16; }
};

__device__ __forceinline__ void store_shared(uint32_t at, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

// A warp's largest magnitudes of its rows of each token; rows beyond the last one become zeros.
template <class C>
__device__ __forceinline__ void stage_row_maxima(const Problem& p, const Work& work, Accumulators<C>& acc,
                                                 const Staging& s) {
  const RowPlaces<C> places{s};
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    if ((first_tile<C>(work, s) + m) * 32 + s.warp * 8 + s.lane / 4 < p.inter) continue;
#pragma unroll
    for (int i = 0; i < C::kMaxWidth / 2; i++) acc[m][i] = 0.0f;
  }
#pragma unroll
  for (int first = 0; first < C::kMaxWidth / 8; first += 4) {
    if (first * 8 >= work.width) break;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int at = (first + i / 2) * 4 + i % 2;
      x[i] = C::kWarpgroupTiles == 1 ? acc[0][at] : max_magnitude(acc[0][at], acc[C::kWarpgroupTiles - 1][at]);
    }
    const int which = s.lane / 4;
    const int token = (first + which / 2) * 8 + s.lane % 4 * 2 + which % 2;
    store_shared(places.of_warp(s.warp, token), bits_of(maximum_of_lanes(x, s.lane)));
  }
}

template <class C>
__device__ __forceinline__ void join_maxima(const Work& work, const Staging& s, BlockMaxima<C>& maxima) {
  const RowPlaces<C> places{s};
  for (int token = s.thread; token < work.width; token += 128) {
    uint32_t amax = load_shared(places.of_warp(0, token));
#pragma unroll
    for (int warp = 1; warp < 4; warp++) amax = max(amax, load_shared(places.of_warp(warp, token)));
    raise_shared(shared_address(maxima.of_block + token), amax);
  }
}

// A block's part of the largest magnitudes of a tile's rows, to its gang.
template <class C>
__device__ __forceinline__ void send_maxima(const RoundingArgs& args, const Work& work, const BlockMaxima<C>& maxima) {
  uint32_t* to = args.maxima + int64_t{work.row_block} * args.rows + work.first_row;
  for (int token = threadIdx.x; token < work.width; token += 128 * C::kConsumers) {
    send_word(to + token, maxima.of_block[token] | kSent);
  }
}

// Those of the whole gang. Each thread looks for some at once.
template <class C>
__device__ __forceinline__ void receive_maxima(const RoundingArgs& args, const Work& work, BlockMaxima<C>& maxima) {
  constexpr int kAtOnce = 2, kThreads = 128 * C::kConsumers;
  const int fours = work.width / 4, all = args.blocks13 * fours;
  const auto from = [&](int at) {
    const int part = at / fours;
    return args.maxima + int64_t{part} * args.rows + work.first_row + 4 * (at - part * fours);
  };
#pragma unroll 1
  for (int start = threadIdx.x; start < all; start += kThreads * kAtOnce) {
    uint4 found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      if (start + i * kThreads < all) found[i] = look_at_four(from(start + i * kThreads));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int at = start + i * kThreads;
      if (at >= all) continue;
      BoundedWait wait;
      while (!are_sent(found[i])) {
        found[i] = look_at_four(from(at));
        if (!check_wait(args, wait)) break;
      }
      const uint32_t to = shared_address(maxima.of_row + 4 * (at % fours));
      raise_shared(to, found[i].x & ~kSent);
      raise_shared(to + 4, found[i].y & ~kSent);
      raise_shared(to + 8, found[i].z & ~kSent);
      raise_shared(to + 12, found[i].w & ~kSent);
    }
  }
}

// fl(x / scale) as quotient(before * x, by, inverse), whatever the scale is: where it has no reciprocal of its own,
// both are multiplied by a power of two; an infinite one makes zeros of what is finite, and NaN of the rest.
struct Divisor {
  float before, by, inverse;
};

__device__ __forceinline__ Divisor divisor_of(float scale) {
  if (!(fabsf(scale) < INFINITY)) return {scale == INFINITY ? 0.0f : scale, 1.0f, 1.0f};
  const float before = w4a8::has_reciprocal(scale) ? 1.0f : scale < 1.0f ? 0x1p64f : 0x1p-64f;
  return {before, scale * before, __frcp_rn(scale * before)};
}

// A thread a token: how its row is rounded.
template <class C>
__device__ __forceinline__ void stage_divisors(const RoundingArgs& args, const Work& work, const Staging& s,
                                               const BlockMaxima<C>& maxima) {
  const RowPlaces<C> places{s};
  const bool keeps = work.row_block == 0 && s.warpgroup == 0;
  for (int token = s.thread; token < work.width; token += 128) {
    const float scale = dynamic_rounding(maxima.of_row[token]).factor;
    if (keeps && token < work.rows) args.row_factor[work.first_row + token] = scale;
    const Divisor d = divisor_of(scale);
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %3};" ::"r"(places.divisor(token)), "f"(d.before), "f"(d.by),
                 "f"(d.inverse)
                 : "memory");
  }
}

template <class C>
__device__ __forceinline__ void round_rows(const Work& work, Accumulators<C>& acc, const Staging& s) {
  const RowPlaces<C> places{s};
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
    const uint32_t at = places.divisor(group * 8 + s.lane % 4 * 2);
    const uint4 first = load_shared16(at), second = load_shared16(at + 16);
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      float &a = acc[m][group * 4], &b = acc[m][group * 4 + 1];
      const auto quotient = [](float x, const uint4& d) {
        return w4a8::quotient(__fmul_rn(x, float_of(d.x)), float_of(d.y), float_of(d.z));
      };
      const float2 rounded = round_two_to_e4m3(quotient(a, first), quotient(b, second));
      a = rounded.x, b = rounded.y;
    }
  }
}

template <class C>
__device__ __forceinline__ void finish_rounded(const RoundingArgs& args, const Work& work, Accumulators<C>& acc,
                                               const Staging& s, BlockMaxima<C>& maxima, BlockMaxima<C>& next) {
  s.synchronize();  // nobody reads the staging any more
  apply_activation<C, Finish::kSwiglu>(args, work, acc, s);
  stage_row_maxima<C>(args.problem, work, acc, s);
  s.synchronize();
  join_maxima<C>(work, s, maxima);
  sync_block<C>();
  send_maxima<C>(args, work, maxima);
  clear_maxima<C>(next);  // all have come here, and read no other tile's
  receive_maxima<C>(args, work, maxima);
  sync_block<C>();
  stage_divisors<C>(args, work, s, maxima);
  s.synchronize();
  round_rows<C>(work, acc, s);
  s.synchronize();
  stage_gated<C>(work, acc, s);
  s.synchronize();
  store_intermediate<C, Sizes<C>::kGatedColumns>(args, work, s, first_tile<C>(work, s) * 32);
}

template <class C>
__device__ __forceinline__ void consume_rounded(const RoundingArgs& args, GemmShared<C>& shared) {
  BlockMaxima<C>* maxima = block_maxima<C>(shared);
  clear_maxima<C>(maxima[0]);
  sync_block<C>();
  int turn = 0;
  const auto begin = [&](const Work& work, Staging& staging, int* slots, int) {
    if (work.second) prefetch_slots(args, work, staging, slots);
  };
  consume<C>(args, shared, begin,
             [&](const Work& work, Accumulators<C>& acc, const Staging& staging, int* slots, int at) {
               if (work.second) {
                 finish_second<C>(args, shared, work, acc, staging, slots);
               } else {
                 finish_rounded<C>(args, work, acc, staging, maxima[turn], maxima[turn ^ 1]);
                 turn ^= 1;
                 __syncwarp();
                 arrive_once_a_warp(shared_address(&shared.stored[at]), staging.lane);
               }
             });
}

template <class C>
__global__ void __launch_bounds__(Sizes<C>::kThreads, C::kBlocks)
    gemm_rounding_kernel(const __grid_constant__ RoundingArgs args) {
  run_block<C, GemmShared<C>>(
      args, args, [](auto&) {}, [&](auto& shared) { find_all_of_gang<C>(args, shared); },
      [&](auto& shared, int thread) {
        if (thread == 96) announce_intermediates(args, shared);
      },
      [&](auto& shared) { consume_rounded<C>(args, shared); });
}

}  // namespace

// Four warpgroups that take turns lose more by waiting for each other than a launch between the GEMMs costs.
template <class Format>
RoundingVariants rounding_variants() {
  using Slim = typename ConfigsOf<Format>::Slim;
  using Wide = typename ConfigsOf<Format>::Wide;
  RoundingVariants variants{};
  variants.of_shape[static_cast<int>(Shape::kSlim)] = variant_of<Slim, GemmShared<Slim>>(gemm_rounding_kernel<Slim>);
  variants.of_shape[static_cast<int>(Shape::kWide)] = variant_of<Wide, GemmShared<Wide>>(gemm_rounding_kernel<Wide>);
  return variants;
}

template RoundingVariants rounding_variants<Nvfp4Format>();
template RoundingVariants rounding_variants<Mxfp4Format>();
}  // namespace moeq::sm90
