// Of the Hopper kernels. Written by scripts/kernel_headers.py: change what it reads, not this.
#pragma once
#include "../names.h"

namespace moeq::sm90 {

constexpr int kTileRows = 64;
constexpr int kTileK = 64;
constexpr int kTileCodeBytes = 2048;
// Local ones: one thread block sorts them.
constexpr int kMaxExperts = 1024;
// Of an expert in the mean: beyond, NVFP4's narrow and wide tiles multiply float16 as it is.
constexpr int kHalfSlots = 24;
// Of the hidden size where weights have 4 bits: a block of MX formats.
constexpr int kHiddenMultiple = 32;
// Of the hidden size where weights have 8 bits: a thread copies as many values.
constexpr int kByteHiddenMultiple = 16;
// Of the hidden and the intermediate size: a copy's bytes, eight gate rows beside eight up.
constexpr int kBf16SizeMultiple = 16;
// For which there is a routing kernel at all.
constexpr int kRouteExperts = 2048;
// A lane has a chosen expert.
constexpr int kRouteTopK = 32;
// A lane has a group's key.
constexpr int kRouteGroups = 32;

// What the weights are: the formats of formats.cuh.
enum class Format : int {
    kNvfp4, kMxfp4, kInt4Per32, kInt4Per64, kInt4Zero, kInt4ZeroBf16, kInt4ZeroPer32, kInt4Float, kFp8, kMxfp8, kInt8
};

constexpr int kFormats = 11;

// Bytes of a tile's scales, by format.
constexpr int kTileScaleBytes[] = {256, 128, 256, 128, 256, 256, 512, 512, 0, 128, 0};

// Bytes of one of them.
constexpr int kEachScaleBytes[] = {1, 1, 2, 2, 4, 8, 4, 8, 4, 1, 4};

constexpr int tile_scale_bytes(Format format) { return kTileScaleBytes[static_cast<int>(format)]; }

// Kernels by their numbers.
constexpr const char* kKernelNames[] = {"decode", "slim", "narrow", "wide"};

// Tiles of prefill (gemm_args.cuh): kernels 1 and on.
enum class Shape : int { kSlim, kNarrow, kWide };

constexpr int kShapes = 3;

// What a router makes of logits: of all of them where experts are chosen, of the chosen ones where they
// are weighted.
enum class Score : int { kIdentity, kSoftmax, kSigmoid, kSqrtsoftplus };

// What fp8 GEMMs multiply (tiled_problem.h).
enum class Weights : int { kPacked, kRows, kBlocks };

}  // namespace moeq::sm90

namespace moeq::sm90::decode {

// Tokens * top_k.
constexpr int kMaxSlots = 2048;

}  // namespace moeq::sm90::decode

namespace moeq::sm90::few {

// Tokens * top_k.
constexpr int kMaxSlots = 128;
// That all lie in shared memory.
constexpr int kMaxTokens = 8;
// Of policy packed, which the other kernel does not decode.
constexpr int kMaxTokensPacked = 16;
// A number beside SM90_KERNELS: decode, but experts may gather their rows.
constexpr int kGatheredKernel = 4;
// That may be so many then.
constexpr int kGatheredTokens = 32;
// Tokens * top_k of these.
constexpr int kGatheredSlots = 256;

}  // namespace moeq::sm90::few

namespace moeq::sm90::w4a8 {

// Of either GEMM: a row is quantized by one thread block.
constexpr int kMaxK = 65536;
constexpr int kTileRows = 64;
constexpr int kTileK = 128;
constexpr int kPackedBytes = 4096;
constexpr int kScaleBytes = 512;
constexpr int kFp8Bytes = 8192;
constexpr int kExponentBias = 64;
// Bit of a block scale whose products may be subnormal.
constexpr int kSlowScale = 128;
constexpr int kZeroScale = 248;
// Where code i of a word has its sign.
constexpr int kSignBits[] = {7, 15, 23, 31, 3, 11, 19, 27};
// Of an expert's w2, from which on it is a large one: other kernels are the faster ones.
constexpr int kLargeValues = 4194304;

}  // namespace moeq::sm90::w4a8

namespace moeq {

template <>
struct Names<sm90::Score> {
  static constexpr const char* kAll[] = {"identity", "softmax", "sigmoid", "sqrtsoftplus"};
};

template <>
struct Names<sm90::Weights> {
  static constexpr const char* kAll[] = {"packed", "rows", "blocks"};
};

}  // namespace moeq
