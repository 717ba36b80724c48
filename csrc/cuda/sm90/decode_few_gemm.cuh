// What the multiplying warps of a decode of very few tokens do, and the finishers, who add up what they leave.
#pragma once
#include "decode_few_hidden.cuh"
#include "decode_multiply.cuh"
#include "formats.cuh"

namespace moeq::sm90::few {

// A warp's sums: two blocks of 16 rows, 32 apart, each for up to eight tokens.
struct Sums {
  float v[2][4];
};

// This warp's share of a stage: 32 rows of tiles `first`, first + kWorkers, ... Both blocks of rows multiply the same
// tokens, which are read once for both.
template <class Format>
__device__ __forceinline__ void multiply_stage(const uint8_t* codes, const uint8_t* scales, const uint8_t* row,
                                               int first, int tiles, Sums& sums) {
  using Word = typename Format::ScaleWord;
#pragma unroll 1
  for (int tile = first; tile < tiles; tile += kWorkers) {
    const uint8_t* code_at = codes + tile * kTileCodeBytes;
    const uint8_t* scale_at = scales + tile * Format::kTileScaleBytes;
    const uint4 code[2] = {*reinterpret_cast<const uint4*>(code_at),
                           *reinterpret_cast<const uint4*>(code_at + kTileCodeBytes / 2)};
    const Word word[2] = {*reinterpret_cast<const Word*>(scale_at),
                          *reinterpret_cast<const Word*>(scale_at + Format::kTileScaleBytes / 2)};
    const uint4 b0 = *reinterpret_cast<const uint4*>(row + tile * 128);
    const uint4 b1 = *reinterpret_cast<const uint4*>(row + tile * 128 + 16);
    const typename Format::Scales scale[2] = {Format::scales(word[0]), Format::scales(word[1])};
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Format::decode(code[i].x, scale[i], a[i]);
      decode::multiply_add(sums.v[i], a[i], b0.x, b0.y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Format::decode(code[i].y, scale[i], a[i]);
      decode::multiply_add(sums.v[i], a[i], b0.z, b0.w);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Format::decode(code[i].z, scale[i], a[i]);
      decode::multiply_add(sums.v[i], a[i], b1.x, b1.y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Format::decode(code[i].w, scale[i], a[i]);
      decode::multiply_add(sums.v[i], a[i], b1.z, b1.w);
    }
  }
}

// A warp's sums of a unit, the `number`-th of this block, for the finishers.
template <Kind kKind>
__device__ __forceinline__ void leave_sums(const Args& args, Fixed& fixed, uint8_t* base, int gemm, int count,
                                           int number, Sums& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, buffer = number % 2;
  barrier_wait(shared_address(&fixed.freed[buffer]), number / 2 % 2 ^ 1);
  const int column = lane % 4 * 2;
  float* to = sums_of(args, base, buffer, warp / 2, column) + warp % 2 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (column + j < count) {
      const float factor = gemm == 1 && Case<kKind>::dynamic_hidden(args.p) ? fixed.h_factor[column + j] : 1.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[j * kTileRows + 32 * i] = sums.v[i][j] * factor;
        to[j * kTileRows + 32 * i + 8] = sums.v[i][j + 2] * factor;
      }
    }
  }
  sums = {};
  __syncwarp();
  if (lane == 0) {
    barrier_arrive(shared_address(&fixed.summed[buffer]));
  }
}

// Adds up what the warps leave of all units, and sends it. Each finisher takes every fourth column.
template <Kind kKind>
__device__ __forceinline__ void finish_units(const Args& args, Fixed& fixed, uint8_t* base) {
  const int lane = threadIdx.x % 32, finisher = threadIdx.x / 32 - kWarps - 1;
  const uint32_t epoch = fixed.epoch;
  int number = 0;
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    Work work = fixed.work[gemm];
    const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
    const bool whole = gemm == 0 && finishes_hidden<kKind>(args, fixed);
#pragma unroll 1
    for (; work.count > 0; --work.count, ++number) {
      const int buffer = number % 2;
      const Entry entry = fixed.entries[work.entry];
      barrier_wait(shared_address(&fixed.summed[buffer]), number / 2 % 2);
#pragma unroll 1
      for (int column = finisher; column < entry.count; column += kFinishers) {
        float2 all = {0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < kWorkers; ++w) {
          const float2 one = *reinterpret_cast<const float2*>(sums_of(args, base, buffer, w, column) + 2 * lane);
          all.x += one.x, all.y += one.y;
        }
        const int slot = fixed.slots[entry.first + column];
        if (whole) {
          send_hidden<kKind>(args, fixed, entry, work.entry, slot, work.row_tile, all);
        } else {
          const int64_t line = static_cast<int64_t>(work.part) * args.slots + slot;
          send_pair((gemm == 0 ? 0 : args.outputs) + (line * row_tiles + work.row_tile) * (kTileRows / 2) + lane, all.x,
                    all.y, epoch);
        }
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(shared_address(&fixed.freed[buffer]));
      }
      next_unit(work, row_tiles);
    }
  }
}

// All units of one GEMM. `number` counts the block's units.
template <class Format, Kind kKind>
__device__ __forceinline__ void run_gemm(const Args& args, Fixed& fixed, uint8_t* base, int gemm, Turn& turn,
                                         int& number) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, thread = threadIdx.x % 64;
  const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
  const int k_tiles = gemm == 0 ? args.k_tiles[0] : args.k_tiles[1];
  const int stage_bytes = args.stage_tiles * kTileBytes;
  const uint32_t full = shared_address(fixed.full), empty = shared_address(fixed.empty);
  const int scales_at = args.stage_tiles * kTileCodeBytes + Format::scale_offset(thread);
  Work work = fixed.work[gemm];
  int known = -1;
  Entry entry = {};
  const uint8_t* row = nullptr;
  Sums sums = {};
#pragma unroll 1
  for (int unit = 0; unit < work.count; ++unit) {
    const int begin = work.part * work.part_tiles, end = min(begin + work.part_tiles, k_tiles);
    if (work.entry * kMaxParts + work.part != known) {
      known = work.entry * kMaxParts + work.part;
      entry = fixed.entries[work.entry];
      const int column = min(lane / 4, entry.count - 1);   // columns without a token repeat the last one
      if (gemm == 0) {
        const int token = fixed.slots[entry.first + column] / args.p.top_k;
        row = base + args.x_offset + token * args.x_stride + begin * 128 + lane % 4 * 32;
      } else {
        gather_hidden<kKind>(args, fixed, work, k_tiles, base + args.h_offset);
        row = base + args.h_offset + column * args.h_stride + lane % 4 * 32;
      }
    }
#pragma unroll 1
    for (int k = begin; k < end; k += work.stage_tiles) {
      const uint8_t* codes = base + args.ring_offset + turn.stage * stage_bytes;
      const int done = k - begin;
      barrier_wait(full + 8 * turn.stage, turn.parity);
      multiply_stage<Format>(codes + 16 * thread, codes + scales_at, row + done * 128,
                     (warp / 2 - done) & (kWorkers - 1), min(work.stage_tiles, end - k), sums);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(empty + 8 * turn.stage);
      }
      next_stage(turn, args.stages);
    }
    leave_sums<kKind>(args, fixed, base, gemm, entry.count, number, sums);
    ++number;
    next_unit(work, row_tiles);
  }
}

}  // namespace moeq::sm90::few
