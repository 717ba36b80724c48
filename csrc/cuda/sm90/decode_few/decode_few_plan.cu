// The host's part of a decode launch for very few tokens.
#include "decode_few_shared.cuh"
#include "../formats/weights_int8.cuh"
#include "../formats/formats.cuh"

namespace moeq::sm90::few {

namespace {

// Tiles of 64 values of K that are not parted, and bytes and numbers of tiles of stages.
struct Tiles {
  int together, bytes, long_stage, short_stage;
};

constexpr Tiles tiles_of(Codes codes) {
  return are_bytes(codes)   ? Tiles{2, kFp8TileBytes, 8, 4}
         : are_mxfp8(codes) ? Tiles{2, kMxfp8TileBytes, 8, 4}
                            : Tiles{are_of_w4a8(codes) ? 2 : 1, kTileBytes, 16, 8};
}

// Of a stage; of formats of layout.h, those of the scales count.
constexpr int tile_bytes(Codes codes, Format format) {
  return are_of_w4a8(codes) ? tiles_of(codes).bytes : tile_bytes_of(tile_scale_bytes(format));
}

// A stage of as many bytes as one of so many tiles of the narrower formats, at most: the kernel takes the same layers.
constexpr int stage_tiles_of(Codes codes, Format format, int tiles) {
  return tiles * tiles_of(codes).bytes / tile_bytes(codes, format);
}

constexpr int part_of(Codes codes, int k_tiles, int bits) {
  const int together = tiles_of(codes).together;
  return together * ceil_div(ceil_div(k_tiles, together), 1 << bits);
}

// Nobody may multiply one: sums of nothing are zero, but scales of its tokens, which nobody makes, might be NaN.
constexpr bool has_empty_part(Codes codes, int k_tiles, int bits) {
  return ((1 << bits) - 1) * part_of(codes, k_tiles, bits) >= k_tiles;
}

// GEMM2's parts, as the exponent of 2: all units should keep all blocks busy to the end; each costs about as much as
// three tiles more. A long operand of many tokens would leave little room for the ring.
int part_bits_for(Codes codes, int units, int k_tiles, int grid, int most) {
  constexpr int kOfUnit = 3, kLong = 64;
  int best = 0;
  double best_cost = 0.0;
  for (int bits = 0; bits <= most; ++bits) {
    if (has_empty_part(codes, k_tiles, bits)) {
      continue;
    }
    const int tiles = part_of(codes, k_tiles, bits);
    const double cost = ceil_div(units << bits, grid) * (tiles + kOfUnit);
    if (bits == 0 || cost < best_cost || (tiles * 2 > kLong && cost <= 1.1 * best_cost)) {
      best = bits;
      best_cost = cost;
    }
  }
  return best;
}

// Of GEMM2's K.
int longest_part(Codes codes, const Args& args) {
  int tiles = 0;
  for (int entries = 1; entries <= args.slots && entries <= kMaxSlots; ++entries) {
    const int part = part_of(codes, args.k_tiles[1], args.part_bits[1][entries]);
    tiles = part > tiles ? part : tiles;
  }
  return tiles;
}

float accumulator_scale(Codes codes, Format format) {
  if (are_mxfp8(codes)) {
    return kMxfp8AccumulatorScale;
  }
  if (codes == Codes::kInt8) {
    return kInt8AccumulatorScale;
  }
  if (are_of_w4a8(codes)) {
    return 1.0f;
  }
  switch (format) {
    case Format::kNvfp4:
      return Nvfp4Format::kAccumulatorScale;
    case Format::kMxfp4:
      return Mxfp4Format::kAccumulatorScale;
    case Format::kInt4Zero:
    case Format::kInt4ZeroBf16:
    case Format::kInt4Float:
      return Int4Sums::kAccumulatorScale;
    default:
      return kInt4AccumulatorScale;
  }
}

Kind kind_of(const Problem& p) {
  const bool usual = p.gated && p.activation <= Activation::kSwigluoai && p.w13_bias == nullptr && p.w2_bias == nullptr;
  const bool given2 = p.a2 == ActScale::kTensor || p.a2 == ActScale::kExpert;
  if (p.x_half) {
    return Kind::kGeneral;
  }
  if (usual && p.a1 == ActScale::kNone && p.a2 == ActScale::kNone) {
    return Kind::kPlain;
  }
  return usual && p.a1 == ActScale::kTensor && given2 && p.format == Format::kNvfp4 ? Kind::kQuantized : Kind::kGeneral;
}

Kind with_shared_units(Kind kind) {
  return kind == Kind::kPlain ? Kind::kPlainShared : kind == Kind::kQuantized ? Kind::kQuantizedShared : kind;
}

// By the kernel for rows that are gathered.
bool may_gather(Codes codes, const Problem& p) {
  const bool has_kernel = codes == Codes::kFourBits || codes == Codes::kBesideFp8;
  return p.gathers && has_kernel && kind_of(p) == Kind::kPlain;
}

bool fits_kernel(Codes codes, const Problem& p, bool gathers) {
  constexpr int kMaxHidden = 1 << 18;   // quotients of larger indices might not be exact
  // Where experts have more tokens than one, reading weights once for all of an expert's wins.
  const bool takes_more = codes == Codes::kPacked || (codes == Codes::kBesideFp8 && p.tokens * p.top_k <= p.experts);
  const int most = gathers ? kGatheredTokens : takes_more ? kMaxTokensPacked : kMaxTokens;
  const int slots = gathers ? kGatheredSlots : kMaxSlots;
  const bool few = p.tokens <= most && p.tokens * p.top_k <= slots && p.hidden < kMaxHidden;
  return few && !p.weight_on_input && p.a1 != ActScale::kExpert;
}

// Whether who multiplies the intermediate rounds it to e4m3.
constexpr bool rounds_hidden(Codes codes) {
  return codes != Codes::kFourBits && codes != Codes::kMxfp8 && !are_bytes_beside_16(codes);
}

// Bytes of an operand's row: values, then scales of e4m3 ones, of which a few fit into the odd 16 bytes that spread
// eight tokens' reads over all banks.
constexpr int operand_stride(Codes codes, int k_tiles) {
  const int scales = !rounds_hidden(codes) ? 0 : codes == Codes::kFp8Groups ? ceil_div(k_tiles, 2) : 1;
  const int more = scales * static_cast<int>(sizeof(float)) - 16;
  return k_tiles * kTileK * 2 + ceil_div(more > 0 ? more : 0, 128) * 128 + 16;
}

constexpr int sums_bytes(int columns) { return 2 * kWorkers * columns * kTileRows * static_cast<int>(sizeof(float)); }

// What lies before the ring in shared memory. `rows`: of tokens; `h_tiles`: of a part of GEMM2's K; `each`: as in Args.
constexpr int bytes_before_ring(Codes codes, int rows, int columns, int x_tiles, int h_tiles, int h_buffers,
                                Kind kind = Kind::kPlain, int each = 1) {
  const int x_bytes = rows * operand_stride(codes, x_tiles);
  const int operands = x_bytes + h_buffers * columns * each * operand_stride(codes, h_tiles);
  return (fixed_bytes(kind) + sums_bytes(columns) + operands + 127) / 128 * 128;
}

constexpr int kLeastStages = 4;

// The sizes that benchmarks/results/hopper_notebook.md names as taken, in the shared memory of a Hopper block:
// Qwen3-30B, gpt-oss, DeepSeek-V3, Mixtral.
constexpr bool takes(Codes codes, int tokens, int columns, int x_tiles, int h_tiles) {
  constexpr int kShared = 227 * 1024;
  const int ring = kLeastStages * tiles_of(codes).long_stage * tiles_of(codes).bytes;
  return bytes_before_ring(codes, tokens, columns, x_tiles, h_tiles, 1) + ring <= kShared;
}
static_assert(takes(Codes::kFourBits, 8, 8, 32, 12) && takes(Codes::kFourBits, 4, 4, 45, 45), "see there");
static_assert(takes(Codes::kFourBits, 3, 4, 112, 32) && takes(Codes::kFourBits, 4, 4, 64, 56), "see there");
static_assert(takes(Codes::kFp8Groups, 8, 8, 32, 12) && takes(Codes::kFp8Rows, 3, 4, 112, 32), "likewise");

// Where slots are more than a warp's lanes, sorting needs a bit of each for each expert.
bool experts_fit(const Args& args, Kind kind) {
  return args.slots <= kFewSlots || args.p.experts * (slots_of(kind) / 8) <= sums_bytes(args.columns);
}

void set_divisors(Codes codes, Args& args, int grid) {
  args.inverse_grid = 1.0f / static_cast<float>(grid);
  args.inverse_top_k = 1.0f / static_cast<float>(args.p.top_k);
  args.inverse_pairs = 1.0f / static_cast<float>(args.p.hidden / 2);
  for (int gemm = 0; gemm < 2; ++gemm) {
    args.inverse_row_tiles[gemm] = 1.0f / static_cast<float>(args.row_tiles[gemm]);
    for (int bits = 0; bits <= kMaxPartBits; ++bits) {
      const int part = part_of(codes, args.k_tiles[gemm], bits);
      args.part_tiles[gemm][bits] = part;
      if (gemm == 1) {
        args.inverse_part_pairs[bits] = 1.0f / static_cast<float>(part * (kTileK / 2));
      }
      const int stages = ceil_div(part, args.stage_tiles);
      const int together = tiles_of(codes).together;
      args.part_stage_tiles[gemm][bits] = together * ceil_div(ceil_div(part, stages), together);
      args.part_groups[gemm][bits] = 2 * stages <= args.stages ? 2 : 1;   // the ring should hold a unit of each
    }
  }
}

// Of one token, whose units are few: into how many parts those of GEMM1 are cut that are left when all blocks have as
// many. A part should be worth the exchange of its sums. Only where one warp sorts does it deal them (`sort_one`).
int shared_bits_for(Codes codes, const Args& args, int more, int grid) {
  constexpr int kLeastTiles = 4;
  const int tiles = args.k_tiles[0];
  int bits = more == 0 || args.p.tokens > 1 || args.slots > kFewSlots ? 0 : kMaxPartBits;
  while (bits > 0 && (more << bits > grid || tiles < kLeastTiles << bits || has_empty_part(codes, tiles, bits))) {
    --bits;
  }
  return bits;
}

void deal_units(Codes codes, Args& args, int grid, bool shares) {
  for (int gemm = 0; gemm < 2; ++gemm) {
    Deal& deal = args.whole[gemm];
    deal.bits = args.slots > kMaxSlots ? 0 : args.part_bits[gemm][args.slots];
    const int units = (args.slots * args.row_tiles[gemm]) << deal.bits;
    deal.each = units / grid;
    deal.more = units % grid;
    deal.shared_bits = shares && gemm == 0 ? shared_bits_for(codes, args, deal.more, grid) : 0;
  }
}

// Into how many parts each GEMM's K is cut for each number of entries; false if the exchange has no room. Of GEMM1 only
// units that blocks share are cut: whole sums can be activated and rounded where they are.
bool choose_parts(Plan& plan) {
  Args& args = plan.args;
  const bool of_rows = args.fp8.rounding[1] == ActScale::kToken;
  const bool sees_rows = of_rows && plan.codes == Codes::kPacked;
  const bool whole_rows = args.p.a2 == ActScale::kToken || sees_rows;
  const bool gathers = plan.kind == Kind::kGathered;
  // Largest magnitudes of rows of which blocks see a part, two in the place of a pair. Of gathered ones they see all.
  const bool cuts_rows = plan.codes == Codes::kBesideFp8 || plan.codes == Codes::kFp8Rows;
  const bool sends_maxima = of_rows && cuts_rows && !gathers;
  const int64_t maxima = sends_maxima ? ceil_div(args.slots * args.row_tiles[0], 2) : 0;
  const int grid = plan.grid;
  const int64_t exchange_pairs = pairs_for(plan.kind) - maxima;
  args.half_pairs = static_cast<int>(pairs_for(plan.kind));
  const int64_t hidden_pairs =
      int64_t{args.slots} * args.row_tiles[0] * hidden_pairs_of_tile(plan.kind, rounds_hidden(plan.codes));
  const int64_t output_pairs = int64_t{args.slots} * args.row_tiles[1] * (kTileRows / 2);
  args.outputs = static_cast<int>(hidden_pairs);
  int most = whole_rows || gathers ? 0 : kMaxPartBits;
  while (most > 0 && hidden_pairs + (output_pairs << most) > exchange_pairs) {
    --most;
  }
  for (int entries = 0; entries <= args.slots && entries <= kMaxSlots; ++entries) {
    args.part_bits[0][entries] = 0;
    const int units = entries * args.row_tiles[1];
    args.part_bits[1][entries] = static_cast<uint8_t>(part_bits_for(plan.codes, units, args.k_tiles[1], grid, most));
  }
  const int64_t used = hidden_pairs + (output_pairs << most), partials = int64_t{grid} * (kTileRows / 2);
  args.partials = static_cast<int>(used);
  deal_units(plan.codes, args, grid, plan.kind != Kind::kGeneral && !gathers && used + partials <= exchange_pairs);
  plan.kind = args.whole[0].shared_bits > 0 ? with_shared_units(plan.kind) : plan.kind;
  plan.exchange_pairs = used + (shares_units(plan.kind) ? partials : 0) + maxima;
  return used <= exchange_pairs;
}

// False if there is no room for a ring of such stages.
bool place_stages(Codes codes, Kind kind, Args& args, int stage_tiles, int shared) {
  const int part = longest_part(codes, args), x_tiles = args.k_tiles[0];
  args.stage_tiles = stage_tiles;
  const auto stages_beside = [&](int h_buffers) {
    const int before = bytes_before_ring(codes, args.rows, args.columns, x_tiles, part, h_buffers, kind, args.each);
    const int stages = (shared - before) / (args.stage_tiles * tile_bytes(codes, args.p.format));
    return stages < kMaxStages ? stages : kMaxStages;
  };
  const int short_stage = stage_tiles_of(codes, args.p.format, tiles_of(codes).short_stage);
  const bool two_fit = args.stage_tiles == short_stage && stages_beside(2) >= kLeastStages;
  args.h_buffers = stages_beside(2) == stages_beside(1) || two_fit ? 2 : 1;
  args.stages = stages_beside(args.h_buffers);
  args.x_stride = operand_stride(codes, x_tiles);
  args.h_stride = operand_stride(codes, part);
  args.fp8.scales_at[0] = x_tiles * kTileK * 2;
  args.fp8.scales_at[1] = part * kTileK * 2;
  args.sums_offset = fixed_bytes(kind);
  args.x_offset = args.sums_offset + sums_bytes(args.columns);
  args.h_offset = args.x_offset + args.rows * args.x_stride;
  args.ring_offset = bytes_before_ring(codes, args.rows, args.columns, x_tiles, part, args.h_buffers, kind, args.each);
  return args.stages >= kLeastStages;
}

// Long stages cost less; short ones are there sooner, where a block has few of them, and take less room, for which they
// are those of weights that only prefill's kernels take else. False if there is none.
bool place_in_shared(Codes codes, Kind kind, Args& args, int grid, int shared) {
  constexpr int kMany = 200;
  const int tiles = args.row_tiles[0] * args.k_tiles[0] + args.row_tiles[1] * args.k_tiles[1];
  const Tiles stage = tiles_of(codes);
  const bool many = args.slots * tiles / grid > kMany;
  // A stage of 8-bit weights should have a tile for each pair of warps.
  const bool is_long = many || are_bytes(codes) || are_mxfp8(codes);
  const int chosen = stage_tiles_of(codes, args.p.format, is_long ? stage.long_stage : stage.short_stage);
  const bool gathers = kind == Kind::kGathered;
  const int short_stage = stage_tiles_of(codes, args.p.format, stage.short_stage);
  const bool has_more = codes == Codes::kBesideFp8 && args.p.tokens > kMaxTokens && !gathers;
  const bool may_be_short = codes == Codes::kPacked || gathers || has_more || args.p.splits || (is_long && !many);
  args.rows = kMaxTokens;
  if (has_more && !place_stages(codes, kind, args, chosen, shared)) {
    return false;  // a layer whose fewer tokens another kernel takes
  }
  for (args.rows = gathers ? kGatheredRows : args.p.tokens * args.each;; args.rows /= 2) {
    if (place_stages(codes, kind, args, chosen, shared) ||
        (may_be_short && place_stages(codes, kind, args, short_stage, shared))) {
      return true;
    }
    if (!gathers || args.rows / 2 < args.columns) {
      return false;
    }
  }
}

// With entries of so many slots at most; false if there is no room.
bool place_columns(Plan& plan, int columns, int shared) {
  Args& args = plan.args;
  for (args.columns = 1; args.columns < args.p.tokens && args.columns < columns; args.columns *= 2) {
  }
  return choose_parts(plan) && place_in_shared(plan.codes, plan.kind, args, plan.grid, shared) &&
         experts_fit(args, plan.kind);
}

// Layers that have room for entries of eight slots take shorter ones beside e4m3 activations: what sums and rows of the
// intermediate leave is the ring's, which is what GEMM2 begins with while the intermediate is exchanged. No expert of
// four tokens has more than two of them.
bool place_units(Plan& plan, bool gathers, int shared) {
  const bool shortens = plan.codes == Codes::kBesideFp8 || plan.codes == Codes::kBesideMxfp8;
  const int shorter = plan.args.p.tokens <= 4 ? 2 : kGatheredColumns;
  if (!place_columns(plan, gathers ? kGatheredColumns : kColumns / plan.args.each, shared)) {
    return false;
  }
  return !shortens || plan.args.columns <= shorter || place_columns(plan, shorter, shared) ||
         place_columns(plan, kColumns, shared);
}

}  // namespace

// `fits` is false if the kernel does not take the problem: where rows are gathered, or where they are not.
static cudaError_t make_plan_of(const Problem& p, Codes codes, const Fp8& fp8, bool gathers, Plan& plan, bool& fits) {
  fits = fits_kernel(codes, p, gathers);
  if (!fits) {
    return cudaSuccess;
  }
  int device = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) {
    return error;
  }
  plan.grid = p.partition.multiprocessors;
  Args& args = plan.args;
  args.p = p;
  args.fp8 = fp8;
  args.mx = are_beside_mxfp8(codes);
  plan.codes = codes;
  args.exchange = p.partition.whole_device ? nullptr : static_cast<uint4*>(p.workspace);
  args.epochs = nullptr;
  args.slots = p.tokens * p.top_k;
  args.each = rows_of_slot(p);
  plan.kind = gathers ? Kind::kGathered : kind_of(p);
  args.scale = accumulator_scale(codes, p.format);
  args.row_tiles[0] = row_tiles13(p.inter, p.gated);
  args.k_tiles[0] = part_of(codes, k_tiles(p.hidden), 0);
  args.row_tiles[1] = ceil_div(p.hidden, kTileRows);
  args.k_tiles[1] = part_of(codes, k_tiles(p.inter), 0);
  fits = place_units(plan, gathers, shared);
  if (fits) {
    set_divisors(codes, args, plan.grid);
    plan.shared_bytes = shared;
  }
  return cudaSuccess;
}

cudaError_t make_plan(const Problem& p, Plan& plan, bool& fits) {
  if (p.format == Format::kFp8 || p.format == Format::kInt8) {
    const Fp8 kept = {{p.scales13, p.scales2}, {ActScale::kNone, ActScale::kNone}, {nullptr, nullptr}, {}};
    const Codes codes = p.format == Format::kInt8 ? Codes::kInt8
                        : p.scales13.blocks       ? Codes::kBlocksBeside16
                                                  : Codes::kRowsBeside16;
    return make_plan(p, codes, kept, plan, fits);
  }
  return make_plan(p, p.format == Format::kMxfp8 ? Codes::kMxfp8 : Codes::kFourBits, {}, plan, fits);
}

cudaError_t make_plan(const Problem& p, Codes codes, const Fp8& fp8, Plan& plan, bool& fits) {
  // Where all rows of so many tokens have room, beside e4m3 activations, they leave little for the ring.
  const bool may = may_gather(codes, p), begins_with = may && p.tokens > kMaxTokens;
  const cudaError_t error = make_plan_of(p, codes, fp8, begins_with, plan, fits);
  return error == cudaSuccess && !fits && may ? make_plan_of(p, codes, fp8, !begins_with, plan, fits) : error;
}

}  // namespace moeq::sm90::few
