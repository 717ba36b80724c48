// Sizes of a decode launch for very few tokens: what the host allocates and what both sides agree on.
#pragma once
#include "../decode/decode_plan.h"
#include "../launch/launches.h"
#include "../problem/problem.h"
#include "../problem/tiled_problem.h"

namespace moeq::sm90::few {

constexpr int kWarps = 16;                       // that multiply; one more copies
constexpr int kThreads = 32 * kWarps;
constexpr int kCopier = kWarps;
constexpr int kFirstHelper = kCopier + 1;
constexpr int kHelpers = 7;                      // add up what the warps leave, make GEMM2's operand and the outputs
constexpr int kHelperThreads = 32 * kHelpers;
constexpr int kBlockThreads = 32 * (kFirstHelper + kHelpers);
constexpr int kWorkers = 8;                      // pairs of warps, each takes every eighth tile
constexpr int kFewSlots = 32;                    // a lane for each
constexpr int kColumns = 8;                      // tokens of an entry at most: the N of mma.m16n8k16
constexpr int kGatheredColumns = 4;              // the same of Kind::kGathered
constexpr int kGatheredRows = 8;                 // that shared memory has room for there, where it has
constexpr int kMaxStages = 12;
constexpr int kMaxBlocks = 1024;                 // of a launch: multiprocessors
constexpr int kTileBytes = 2048 + 256;           // that a stage has for a tile, whatever its format: at least
constexpr int kFp8TileBytes = 4096;              // half of a tile of w4a8_layout.h: 64 rows by 64 values of K
constexpr int kMxfp8TileBytes = kFp8TileBytes + tile_scale_bytes(Format::kMxfp8);
constexpr int kMaxPartBits = 2;                  // K is cut into 1, 2 or 4 parts
constexpr int64_t kExchangePairs = 1 << 18;      // of 16 bytes, see decode_exchange.cuh
constexpr int64_t kGatheredPairs = 1 << 20;      // the same of Kind::kGathered

constexpr int tile_bytes_of(int scale_bytes) {
  return kTileCodeBytes + scale_bytes > kTileBytes ? kTileCodeBytes + scale_bytes : kTileBytes;
}

// What the kernel is compiled for, so that questions are answered before it runs: W4A16 or W4A4 with given scales where
// the activation is silu or swiglu and nothing has a bias; both for one token where blocks share units of GEMM1;
// everything; and W4A16 as before for more tokens, if the problem says so (`gathers`): shared memory has only the rows
// of the entries that a block multiplies.
enum class Kind : int { kPlain, kPlainShared, kQuantized, kQuantizedShared, kGeneral, kGathered };
constexpr int kKinds = 6;

// Of a launch's exchange.
constexpr int64_t pairs_for(Kind kind) { return kind == Kind::kGathered ? kGatheredPairs : kExchangePairs; }

// What an entry's slot has of it for a row tile of GEMM1: room for its sums, or for what is activated. `rounds`: who
// multiplies that rounds it to e4m3.
constexpr int hidden_pairs_of_tile(Kind kind, bool rounds = false) {
  return kind == Kind::kGathered && !rounds ? kTileRows / 8 : kTileRows / 2;
}

constexpr bool shares_units(Kind kind) { return kind == Kind::kPlainShared || kind == Kind::kQuantizedShared; }

// How the units of a GEMM are dealt to the thread blocks: `each` of them to every one, and `more` are left.
struct Deal {
  int bits;  // a unit is one of 2^bits parts of K
  int each, more;
  int shared_bits;  // those left are cut into 2^shared_bits parts, one for a block; 0: some blocks have one more
};

// Where tokens and the intermediate are rounded to e4m3, and of e4m3 and int8 weights; of GEMM1 and GEMM2.
struct Fp8 {
  WeightScales weights[2];
  ActScale rounding[2];
  const float* gscale[2];
  int scales_at[2];  // where an operand's row has its scales, in bytes
};

struct Args {
  Problem p;
  uint4* exchange;  // see decode_exchange.cuh
  int half_pairs;  // of its halves, if it has two
  uint32_t* epochs;
  int row_tiles[2], k_tiles[2];  // of GEMM1 and GEMM2
  int slots;
  int columns;  // of an entry at most: 1, 2, 4 or 8
  int each;  // rows of operands that one of them has, and one token: 2 where they are float16 as two bfloat16
  int stage_tiles, stages;
  int x_stride, h_stride;  // bytes of an operand's row in shared memory
  int h_buffers;  // 2, or 1 where there is no room
  int rows;  // of tokens that shared memory has room for
  int x_offset, h_offset, sums_offset, ring_offset;  // in shared memory
  float inverse_grid, inverse_row_tiles[2], inverse_top_k, inverse_pairs;  // of divisors; pairs: of a token's columns
  float inverse_part_pairs[kMaxPartBits + 1];  // of the intermediate's columns
  int part_tiles[2][kMaxPartBits + 1], part_stage_tiles[2][kMaxPartBits + 1];
  int part_groups[2][kMaxPartBits + 1];  // of the warps that multiply, each takes every other unit: 1 or 2
  float scale;  // what sums of decoded weights lack
  int outputs;  // where GEMM2's sums begin in the exchange
  int partials;  // and those of units that blocks share
  Deal whole[2];  // of one token, all of whose experts are this rank's
  uint8_t part_bits[2][kMaxSlots + 1];  // parts of K for that many entries: all blocks get the same
  bool mx;  // activations are rounded to mxfp8, whatever `fp8.rounding` says
  Fp8 fp8;
};

// What weights are: those of layout.h; e4m3 beside e4m3 activations, with scales of rows, or of 128 x 128 and of 128
// values of a token; those of layout.h beside activations that are rounded to e4m3; NVFP4 of policy `packed`; MXFP8,
// beside 16 bits and mxfp8; e4m3 beside 16 bits; int8 with scales of rows, beside 16 bits.
enum class Codes : int {
  kFourBits,
  kFp8Rows,
  kFp8Groups,
  kBesideFp8,
  kBesideMxfp8,
  kPacked,
  kMxfp8,
  kBothMxfp8,
  kRowsBeside16,
  kBlocksBeside16,
  kInt8
};

// Bytes whose scales are beside the tiles.
constexpr bool are_bytes_beside_16(Codes codes) {
  return codes == Codes::kRowsBeside16 || codes == Codes::kBlocksBeside16 || codes == Codes::kInt8;
}
constexpr bool are_bytes(Codes codes) {
  return codes == Codes::kFp8Rows || codes == Codes::kFp8Groups || are_bytes_beside_16(codes);
}
constexpr bool are_mxfp8(Codes codes) { return codes == Codes::kMxfp8 || codes == Codes::kBothMxfp8; }
constexpr bool are_of_w4a8(Codes codes) { return are_bytes(codes) || are_mxfp8(codes) || codes == Codes::kPacked; }
constexpr bool are_beside_mxfp8(Codes codes) { return codes == Codes::kBesideMxfp8 || codes == Codes::kBothMxfp8; }

struct Plan {
  Args args;
  Codes codes;
  Kind kind;
  size_t exchange_pairs;  // that the launch may use
  int grid;
  int shared_bytes;
};

// Where launches that take the whole device exchange: variables of a source of kernels, found once on each device.
struct KnownExchange {
  KnownAddresses pairs, epochs;
};

template <class Pairs, class Epochs>
cudaError_t find_exchange(Pairs& pairs, Epochs& epochs, KnownExchange& known, Args& args) {
  void *exchange = nullptr, *counts = nullptr;
  cudaError_t error = find_variable(pairs, known.pairs, exchange);
  if (error == cudaSuccess) {
    error = find_variable(epochs, known.epochs, counts);
  }
  args.exchange = static_cast<uint4*>(exchange);
  args.epochs = static_cast<uint32_t*>(counts);
  return error;
}

// What a launch that does not take the whole device needs of the workspace.
inline size_t exchange_bytes(const Plan& plan) { return plan.exchange_pairs * sizeof(uint4); }

// fits: whether the kernel takes the problem, and there is room for it.
cudaError_t make_plan(const Problem& p, Plan& plan, bool& fits);
// The same of any weights. p.a1 and p.a2 are kNone: `fp8` says how activations are rounded, but for `scales_at`.
cudaError_t make_plan(const Problem& p, Codes codes, const Fp8& fp8, Plan& plan, bool& fits);

cudaError_t run(Plan& plan);
// Clears a launch's own exchange, in its workspace, or finds that of the whole device.
cudaError_t give_exchange(const Plan& plan, Args& args);
// By the kernel that the plan was made for; `known`: devices that have allowed its shared memory.
cudaError_t launch(Plan& plan, const void* kernel, KnownDevices& known);

// The same of 4-bit weights beside activations that are rounded to e4m3, and of e4m3 and int8 weights.
cudaError_t make_e4m3_plan(const RoundedProblem& p, Plan& plan, bool& fits);
cudaError_t run_e4m3(Plan& plan);
cudaError_t make_fp8_plan(const W4a8Problem& p, Plan& plan, bool& fits);
cudaError_t run_fp8(Plan& plan);

// Where rows are gathered: see Kind::kGathered.
cudaError_t run_gathered(Plan& plan);
// That of launches which take the whole device. It is far larger than that of the other kinds, and lies beside these
// kernels, so that memory is taken when the first of them is.
cudaError_t find_gathered_exchange(Args& args);

// Of INT4 weights, beside 16-bit activations and e4m3 ones, and of MXFP8 weights, beside 16-bit ones and mxfp8.
const void* int4_kernel_of(Format format, Kind kind);
const void* int4_e4m3_kernel_of(Format format, Kind kind);
cudaError_t run_mxfp8(Plan& plan);

}  // namespace moeq::sm90::few
