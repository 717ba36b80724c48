// The prepared layouts of weights that are multiplied with fp8 activations, and of all weights of 8 bits; and how 4-bit
// codes become e4m3 bytes.
//
// Tiles of 64 rows by 128 values of K. With g = lane / 4 of a warp, its rows g and g + 8 of 16 are rows 8 * q + g of
// gate and of up where w13 is gated (q = 4 * tile + warp), else rows 2 * g and 2 * g + 1 of the 16. Rows and K are
// padded.
//
// K is permuted within halves of 64, for weights and tokens alike: byte 32 * s + 16 * u + 4 * c + b of a tile's 128 is
// K = 64 * (s / 2) + 16 * c + 8 * (s % 2) + 4 * u + b. In K-step s of 32 a thread (lane % 4 = c) holds the bytes of c,
// so the 16 values that share a block scale are one thread's, and a table of eight bytes serves them all.
//
// NVFP4 codes (policy `packed`). Codes, 4096 bytes a tile: the 16 bytes at 2048 * (s / 2) + 16 * thread are words
// 2 * (s % 2) + h of row g + 8 * h: the magnitude of code i (K as above, i = 4 * u + b) at bits 4 * i, its sign at bit
// kSignBits[i].
// Scales, 512 bytes a tile: byte 4 * thread + 2 * (s / 2) + h. A row has an exponent x; the scale 2^r * (1 + m / 8) of
// a block is (r - x + 5) << 3 | m where -5 <= r - x <= 10, and then no product of the block is subnormal in e4m3, or
// 128 + ((r - x + 12) << 3 | m) where -12 <= r - x <= -6. Scales too large to meet a code that is not zero (11 <= r - x
// <= 18) are 128 + ((r - x - 4) << 3 | m), a scale of zero is 248.
//
// After a row tile's scales follow its 64 exponents x + kExponentBias, row 16 * warp + g + 8 * h at that place.
//
// MXFP4 codes (policy `packed`): the same, but that 32 values share a scale 2^r. Scales, 256 bytes a tile: byte
// 4 * (thread / 2) + 2 * (s / 2) + h, which is (r - x + 5) << 3 where -5 <= r - x <= 10, and 128 + (-6 - (r - x)) where
// -133 <= r - x <= -6: from r - x = -13 on all products round to zero. Of a block whose codes are all zero it is the
// checkpoint's byte. Exponents: x + kMxExponentBias.
//
// e4m3 codes (policy `folded`, fp8, fp8_block, mxfp8). The bytes themselves, 8192 a tile: 128 of each row, the row's
// 16-byte pieces exchanged as the 128-byte swizzle of wgmma has it. Scales are beside the tiles, in float32 and in the
// order of the rows (tiled_problem.h); those of mxfp8 in tiles of 256 bytes: byte 128 * half + 2 * (2 * (t / 4) + c /
// 2) + h is the exponent of the 32 values of K at 64 * half + 32 * (c / 2), as the checkpoint has it.
//
// int8 codes: the same.
#pragma once
#include <cstdint>

#include "../../../generated/sm90.h"

namespace moeq::sm90::w4a8 {

constexpr int kMxScaleBytes = kTileRows * kTileK / 32;
constexpr int kMxExponentBias = 136;  // of MXFP4's rows, whose weights may be as small as 2^-128

constexpr int tiles(int size, int tile) { return (size + tile - 1) / tile; }

}  // namespace moeq::sm90::w4a8
