// The host's part of a decode launch for very few tokens.
#include "decode_few_shared.cuh"
#include "formats.cuh"

namespace moeq::sm90::few {

namespace {

// All units should keep all blocks busy to the end; each costs about as much as three tiles more. `longest`: a long
// operand of many tokens would leave little room for the ring.
int parts_for(int units, int k_tiles, int grid, int most, int longest) {
  constexpr int kOfUnit = 3;
  int best = 1;
  double best_cost = 0.0;
  for (int parts = 1; parts <= most; parts *= 2) {
    const int tiles = ceil_div(k_tiles, parts);
    const double cost = ceil_div(units * parts, grid) * (tiles + kOfUnit);
    if (parts == 1 || cost < best_cost || (tiles * 2 > longest && cost <= 1.1 * best_cost)) {
      best = parts;
      best_cost = cost;
    }
  }
  return best;
}

int longest_part(const Args& args, int gemm) {
  int tiles = 0;
  for (int entries = 1; entries <= args.slots; ++entries) {
    const int part = ceil_div(args.k_tiles[gemm], args.parts[gemm][entries]);
    tiles = part > tiles ? part : tiles;
  }
  return tiles;
}

float accumulator_scale(Format format) {
  return format == Format::kNvfp4   ? Nvfp4Format::kAccumulatorScale
         : format == Format::kMxfp4 ? Mxfp4Format::kAccumulatorScale
                                    : kInt4AccumulatorScale;
}

Kind kind_of(const Problem& p) {
  const bool usual = p.gated && p.activation <= Activation::kSwigluoai && p.w13_bias == nullptr && p.w2_bias == nullptr;
  const bool given2 = p.a2 == ActScale::kTensor || p.a2 == ActScale::kExpert;
  if (usual && p.a1 == ActScale::kNone && p.a2 == ActScale::kNone) {
    return Kind::kPlain;
  }
  return usual && p.a1 == ActScale::kTensor && given2 && p.format == Format::kNvfp4 ? Kind::kQuantized : Kind::kGeneral;
}

bool fits_kernel(const Problem& p) {
  return p.tokens <= kMaxTokens && p.tokens * p.top_k <= kMaxSlots && !p.weight_on_input && p.a1 != ActScale::kExpert;
}

}  // namespace

cudaError_t make_plan(const Problem& p, Plan& plan, bool& fits) {
  fits = fits_kernel(p);
  if (!fits) {
    return cudaSuccess;
  }
  int device = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&plan.grid, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) {
    return error;
  }
  Args& args = plan.args;
  args.p = p;
  args.slots = p.tokens * p.top_k;
  for (args.columns = 1; args.columns < p.tokens && args.columns < kColumns; args.columns *= 2) {
  }
  args.scale = accumulator_scale(p.format);
  plan.kind = kind_of(p);
  args.row_tiles[0] = row_tiles13(p.inter, p.gated);
  args.k_tiles[0] = k_tiles(p.hidden);
  args.row_tiles[1] = ceil_div(p.hidden, kTileRows);
  args.k_tiles[1] = k_tiles(p.inter);
  int64_t pairs[2] = {};
  // Fewer parts where the exchange has no room for more.
  for (int most = kMaxParts; most > 0; most /= 2) {
    for (int gemm = 0; gemm < 2; ++gemm) {
      const int limit = gemm == 0 ? (most < 2 ? most : 2) : p.a2 == ActScale::kToken ? 1 : most;
      int used = 1;
      for (int entries = 1; entries <= args.slots; ++entries) {
        const int units = entries * args.row_tiles[gemm];
        const int parts = parts_for(units, args.k_tiles[gemm], plan.grid, limit, gemm == 0 ? 1 << 20 : 64);
        args.parts[gemm][entries] = static_cast<uint8_t>(parts);
        used = parts > used ? parts : used;
      }
      pairs[gemm] = int64_t{used} * args.slots * args.row_tiles[gemm] * (kTileRows / 2);
    }
    if (pairs[0] + pairs[1] <= kExchangePairs) {
      break;
    }
  }
  args.outputs = static_cast<int>(pairs[0]);
  args.x_stride = args.k_tiles[0] * kTileK * 2 + 16;   // the odd 16 bytes spread eight tokens' reads over all banks
  args.h_stride = longest_part(args, 1) * kTileK * 2 + 16;
  args.sums_offset = fixed_bytes();
  args.x_offset = args.sums_offset + 2 * kWorkers * args.columns * kTileRows * static_cast<int>(sizeof(float));
  args.h_offset = args.x_offset + p.tokens * args.x_stride;
  args.ring_offset = (args.h_offset + args.columns * args.h_stride + 127) / 128 * 128;
  const int room = shared - args.ring_offset;
  // Long stages cost less; short ones are there sooner, where a block has few of them.
  constexpr int kMany = 200;
  const int tiles = args.row_tiles[0] * args.k_tiles[0] + args.row_tiles[1] * args.k_tiles[1];
  args.stage_tiles = args.slots * tiles / plan.grid > kMany ? 16 : 8;
  args.stages = room / (args.stage_tiles * kTileBytes);
  args.stages = args.stages < kMaxStages ? args.stages : kMaxStages;
  plan.shared_bytes = shared;
  fits = pairs[0] + pairs[1] <= kExchangePairs && args.stages >= 4;
  return cudaSuccess;
}

}  // namespace moeq::sm90::few
