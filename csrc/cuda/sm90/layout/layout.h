// The prepared layout `cuda_sm90` of 4-bit weights: tiles of 64 rows by 64 values of K, in the order in which the
// threads of a warpgroup hold the A operand of wgmma (and each warp that of mma.m16n8k16).
//
// K is permuted inside a tile so that 16 values that share a scale belong to one thread: with g = lane / 4,
// c = lane % 4, a thread holds K = 16 * c .. 16 * c + 15 of rows g and g + 8 of its warp's 16, four of each in every
// one of the tile's four K-steps. What is multiplied with it (the token operand) takes the same order: K-column 2 * c +
// 8 * u + b of K-step j is K = 16 * c + 4 * j + 2 * u + b of the tile (u, b in {0, 1}).
//
// Codes, 2048 bytes a tile: thread t = 32 * warp + lane reads the 16 bytes at 16 * t, word j of which (little endian)
// are its eight codes of K-step j. Register i of the fragment holds
//   row 16 * warp + g + 8 * (i % 2),  K = 16 * c + 4 * j + 2 * (i / 2) (low half) and one more (high half).
// Let v[i] be such a register as bfloat16 bits (sign 15, code's other three bits 8..6; the same 16 higher), and
// m = 0x81C081C0. The word w spreads them so that few operations take them apart:
//   v[0] = (w << 6) & m, v[1] = (w << 2) & m, v[2] = rotate_right(w, 4) & m, v[3] = (w ^ (w >> 8)) & m.
// `_encode` of torch_moe_ops/backends/sm90/layout.py is the inverse.
//
// That is NVFP4 and MXFP4. INT4: the codes of register i (0 to 15 as stored) are bits 4 * i .. 4 * i + 3 (low half) and
// 16 + 4 * i .. (high half).
//
// Scales, tiled like the codes; rows g and g + 8 beside each other, so that a thread loads both at once (formats.cuh).
//
// NVFP4, 256 bytes a tile: byte 2 * t + h scales row 16 * warp + g + 8 * h, K = 16 * c .. 16 * c + 15. A byte
// is 0 for a scale of zero, else (r + 23) << 3 | m for the e4m3 scale 2^r * (1 + m / 8), subnormals normalized.
// (byte << 4) + 0x6000 is then 2^88 times the scale in bfloat16. (0 decodes to 2^-23: the codes of a block whose scale
// is zero are zero wherever a quantizer wrote them, and others are worth 2^-31 of the largest weight at most.)
//
// MXFP4, 128 bytes: byte 2 * (2 * (t / 4) + c / 2) + h, the exponent as it is; 32 values of K share it.
//
// INT4, bfloat16 scales per 32 of K (256 bytes, index as for MXFP4) or per 64 (128 bytes, index 2 * (t / 4) + h): the
// scale times 2^112 for h = 0, times 2^108 for h = 1, because the decoder takes the codes of that row where they are
// worth 16 times as much. Larger groups are repeated.
//
// INT4 with zero points or float16 scales, 32 bits per 64 of K (256 bytes, index 2 * (t / 4) + h): the product above as
// bfloat16 in the low half, what that rounds away in the upper ten bits, then two bits for `restore`, and the zero
// point. Where no scale is float16 nothing is rounded away, and a decoder need not add it: these have the same bytes,
// in elements of 64 bits, by which the op tells them. Such 32 bits per 32 of K (512 bytes, index as for MXFP4) where
// all groups have 32.
//
// INT4 with float32 scales, 64 bits per 64 of K (512 bytes, index 2 * (t / 4) + h): the product above in float32, then
// the zero point and what `restore` needs.
//
// Rows of w13 where gated: row 16 * q + g of a layer is gate row 8 * q + g, row 16 * q + 8 + g up row 8 * q + g, so
// that a thread holds both of a column. Rows and K are padded to multiples of 64 with zeros: the codes and the scales.
#pragma once
#include <cstdint>

#include "../../../generated/sm90.h"

namespace moeq::sm90 {

// What an accumulator of decoded weights lacks: codes come out as 2^-126, scales as 2^88.
constexpr float kAccumulatorScale = 274877906944.0f;  // 2^38

// Whether weights are bytes in the tiles of w4a8_layout.h.
constexpr bool has_bytes(Format format) {
  return format == Format::kFp8 || format == Format::kMxfp8 || format == Format::kInt8;
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int row_tiles13(int inter, bool gated) { return ceil_div(gated ? 2 * inter : inter, kTileRows); }
constexpr int k_tiles(int k) { return ceil_div(k, kTileK); }

}  // namespace moeq::sm90
