// How the units of work of a decode of very few tokens are dealt to the thread blocks: each block works its share out
// for itself.
#pragma once
#include "decode_few.h"

namespace moeq::sm90::few {

// A thread block's share of one GEMM: `count` units from this one on. A unit is a part of K of a row tile; units lie in
// the order entry, part, row tile.
struct Work {
  int entry, part, row_tile, count;
  int part_bits;   // of 2^part_bits parts; < 0: the first unit is one of GEMM1 that 2^-part_bits blocks share
  int part_tiles, stage_tiles;
  int groups;   // of the warps that multiply, each takes every other unit
};

constexpr int kSharedUnit = 2, kShares = 3;   // after GEMM1's and GEMM2's

// n / d for the inverse of d, where n < 2^21.
__device__ __forceinline__ int quotient(int n, float inverse) {
  return __float2int_rz((static_cast<float>(n) + 0.5f) * inverse);
}

// A block's share of GEMM `gemm`: as many units as others have, or one more. The first blocks have more of GEMM1, the
// last ones of GEMM2.
template <Kind kKind = Kind::kPlain>
__device__ __forceinline__ Work share_of(const Args& args, int gemm, int entries) {
  const int bits = kKind == Kind::kGathered ? 0 : args.part_bits[gemm][entries], row_tiles = args.row_tiles[gemm];
  const int units = (entries * row_tiles) << bits, block = blockIdx.x, grid = gridDim.x;
  const int each = quotient(units, args.inverse_grid), more = units - each * grid;
  const int early = gemm == 0 ? more : 0, late = gemm == 0 ? grid : grid - more;
  const int begin = block * each + min(block, early) + max(block - late, 0);
  const int stripe = quotient(begin, args.inverse_row_tiles[gemm]);
  Work work;
  work.row_tile = begin - stripe * row_tiles;
  work.entry = stripe >> bits;
  work.part = stripe & ((1 << bits) - 1);
  work.count = each + (block < early || block >= late ? 1 : 0);
  // Where GEMM2's first operand has one unit, the other group would not wait for it and could miss a phase of `made`.
  const bool skips = work.count == 1 || (gemm == 1 && work.row_tile == row_tiles - 1);
  work.groups = skips ? 1 : args.part_groups[gemm][bits];
  work.part_bits = bits;
  work.part_tiles = args.part_tiles[gemm][bits];
  work.stage_tiles = args.part_stage_tiles[gemm][bits];
  return work;
}

// The same of one token, all of whose experts are ours, where blocks share the units of GEMM1 that are left when all
// have as many. `share`: of which GEMM, or kSharedUnit.
__device__ __forceinline__ Work share_of_whole(const Args& args, int share) {
  const int gemm = share == 1 ? 1 : 0, row_tiles = args.row_tiles[gemm], block = blockIdx.x, grid = gridDim.x;
  const Deal& deal = args.whole[gemm];
  const int late = gemm == 0 ? grid : grid - deal.more, own = deal.each + (block >= late ? 1 : 0);
  const bool shared = share == kSharedUnit, has_part = gemm == 0 && block < deal.more << deal.shared_bits;
  const int bits = shared ? deal.shared_bits : deal.bits;
  const int begin = shared ? grid * deal.each + (block >> bits) : block * deal.each + max(block - late, 0);
  const int stripe = quotient(begin, args.inverse_row_tiles[gemm]);
  Work work;
  work.row_tile = begin - stripe * row_tiles;
  work.entry = shared ? stripe : stripe >> bits;
  work.part = (shared ? block : stripe) & ((1 << bits) - 1);
  work.count = shared && !has_part ? 0 : own + has_part;
  work.groups = own <= 1 || (gemm == 1 && work.row_tile == row_tiles - 1) ? 1 : args.part_groups[gemm][deal.bits];
  work.part_bits = shared ? -bits : bits;
  work.part_tiles = args.part_tiles[gemm][bits];
  work.stage_tiles = args.part_stage_tiles[gemm][bits];
  return work;
}

__device__ __forceinline__ void next_unit(Work& work, int row_tiles) {
  if (++work.row_tile == row_tiles) {
    work.row_tile = 0;
    if (++work.part == 1 << work.part_bits) {
      work.part = 0;
      ++work.entry;
    }
  }
}

// A block's first unit, of its three shares. Of its units of GEMM1 its part of one that blocks share comes first, so
// that its sums are there when they are needed.
template <Kind kKind>
__device__ __forceinline__ Work first_unit(const Work* shares, int gemm) {
  return shares[shares_units(kKind) && gemm == 0 && shares[kSharedUnit].count > 0 ? kSharedUnit : gemm];
}

template <Kind kKind>
__device__ __forceinline__ void next_unit(const Work* shares, Work& work, int row_tiles) {
  if (shares_units(kKind) && work.part_bits < 0) {
    const int count = work.count;
    work = shares[0];
    work.count = count;
  } else {
    next_unit(work, row_tiles);
  }
}

}  // namespace moeq::sm90::few
