// The host's plan of a decode launch for very few tokens behind a C interface, on a multiprocessor count and shared
// memory that the test gives: no GPU is asked. And the units that each thread block works out for itself, by the
// kernel's own code compiled for the CPU.
#include <cstring>
#include <vector>

#include <cuda_runtime.h>

namespace {

int shared_memory;
char workspace[16];
uint3 this_block;
dim3 this_grid;

cudaError_t no_device(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t given_attribute(int* value, cudaDeviceAttr, int) {
  *value = shared_memory;
  return cudaSuccess;
}

}  // namespace

#include "../../csrc/cuda/sm90/decode_few/decode_few.h"
#pragma push_macro("__device__")
#undef __device__
#define __device__
#define blockIdx this_block
#define gridDim this_grid
#define __float2int_rz(value) static_cast<int>(value)
#include "../../csrc/cuda/sm90/decode_few/decode_few_deal.cuh"
#undef __float2int_rz
#undef gridDim
#undef blockIdx
#pragma pop_macro("__device__")

#define cudaGetDevice no_device
#define cudaDeviceGetAttribute given_attribute
#include "../../csrc/cuda/sm90/decode_few/decode_few_plan.cu"

namespace few = moeq::sm90::few;

constexpr int kWholeDevice = 132;

// What a test asks for: the multiprocessors that the call has and a block's shared memory, then the call.
struct Layer {
  int sms, shared, tokens, top_k, experts, hidden, inter, gated, dynamic, format, gathers, half;
};

namespace {

bool shares(const few::Plan& plan) { return few::shares_units(plan.kind); }
bool gathers(const few::Plan& plan) { return plan.kind == few::Kind::kGathered; }

// Parts of a GEMM's K, as the exponent of 2.
int bits_of(const few::Plan& plan, int gemm, int entries) {
  return gathers(plan) ? 0 : plan.args.part_bits[gemm][entries];
}

// All units are dealt, no block gets two parts, no part is empty, and their sums have room behind all others.
bool shares_rightly(const few::Plan& plan) {
  const few::Args& args = plan.args;
  const few::Deal& deal = args.whole[0];
  const int parts = 1 << deal.shared_bits, tiles = args.part_tiles[0][deal.shared_bits];
  const int64_t outputs = int64_t{args.slots} * args.row_tiles[1] * (moeq::sm90::kTileRows / 2);
  bool right = args.p.tokens == 1 && args.slots <= few::kFewSlots;   // one warp sorts, and deals them
  right = right && parts > 1 && deal.more > 0 && deal.more * parts <= plan.grid;
  right = right && deal.each * plan.grid + deal.more == args.slots * args.row_tiles[0];
  right = right && (parts - 1) * tiles < args.k_tiles[0];
  right = right && args.partials >= args.outputs + (outputs << args.part_bits[1][args.slots]);
  const size_t end = args.partials + size_t{static_cast<unsigned>(plan.grid)} * (moeq::sm90::kTileRows / 2);
  return right && end <= few::kExchangePairs && end <= plan.exchange_pairs;
}

// What every plan that fits must hold for.
bool holds(const few::Plan& plan) {
  const few::Args& args = plan.args;
  const bool in_pairs = few::are_of_w4a8(plan.codes);
  const int ring = args.stages * args.stage_tiles * few::tile_bytes(plan.codes, args.p.format);
  bool right = plan.shared_bytes == shared_memory && args.ring_offset + ring <= shared_memory;
  right = right && args.stages >= few::kLeastStages && args.stages <= few::kMaxStages;
  right = right && args.each == (args.p.splits ? 2 : 1) && args.columns * args.each <= few::kColumns;
  right = right && args.h_offset + args.h_buffers * args.columns * args.each * args.h_stride <= args.ring_offset;
  right = right && args.rows >= (gathers(plan) ? args.columns : args.p.tokens * args.each);
  right = right && args.x_offset + args.rows * args.x_stride <= args.h_offset;
  right = right && args.sums_offset >= few::fixed_bytes(plan.kind) && args.slots <= few::slots_of(plan.kind);
  const int sums = args.x_offset - args.sums_offset, of_expert = few::slots_of(plan.kind) / 8;
  right = right && (args.slots <= few::kFewSlots || args.p.experts * of_expert <= sums);
  const size_t room = few::pairs_for(plan.kind);
  right = right && args.half_pairs == few::pairs_for(plan.kind);
  if (plan.codes != few::Codes::kFourBits) {   // a row has room for its scales, behind its values
    const int scales = plan.codes == few::Codes::kFp8Groups ? args.k_tiles[0] / 2 : 1;
    const int at = args.fp8.scales_at[0], end = at + scales * static_cast<int>(sizeof(float));
    right = right && at >= args.k_tiles[0] * moeq::sm90::kTileK * 2 && end <= args.x_stride;
    right = right && args.fp8.scales_at[1] + static_cast<int>(sizeof(float)) <= args.h_stride;
  }
  for (int entries = 1; entries <= args.slots; ++entries) {
    for (int gemm = 0; gemm < 2; ++gemm) {
      const int bits = bits_of(plan, gemm, entries), tiles = args.part_tiles[gemm][bits];
      right = right && tiles << bits >= args.k_tiles[gemm] && ((1 << bits) - 1) * tiles < args.k_tiles[gemm];
      right = right && args.part_stage_tiles[gemm][bits] <= args.stage_tiles;
      // Two tiles of 64 values of K lie together, and have a scale.
      right = right && (!in_pairs || (tiles % 2 == 0 && args.part_stage_tiles[gemm][bits] % 2 == 0));
    }
    const int64_t outputs = int64_t{args.slots} * args.row_tiles[1] * (moeq::sm90::kTileRows / 2);
    const size_t end = args.outputs + (outputs << bits_of(plan, 1, entries));
    right = right && end <= room && end <= plan.exchange_pairs;
  }
  right = right && args.outputs >= args.slots * args.row_tiles[0] * few::hidden_pairs_of_tile(plan.kind);
  return right && (!shares(plan) || shares_rightly(plan));
}

// -1: no plan could be made, 0: the kernel does not take the layer, else what `found` says of the plan.
template <class Found>
int answer(const Layer& layer, Found found) {
  shared_memory = layer.shared;
  moeq::sm90::Problem p = {};
  p.tokens = layer.tokens, p.top_k = layer.top_k, p.experts = layer.experts;
  p.hidden = layer.hidden, p.inter = layer.inter;
  p.gated = layer.gated != 0;
  p.activation = p.gated ? moeq::Activation::kSilu : moeq::Activation::kRelu2NoMul;
  p.a1 = p.a2 = layer.dynamic != 0 ? moeq::sm90::ActScale::kToken : moeq::sm90::ActScale::kNone;
  few::Codes codes = few::Codes::kFourBits;
  few::Fp8 fp8 = {};
  if (layer.format < moeq::sm90::kFormats) {
    p.format = static_cast<moeq::sm90::Format>(layer.format);
  } else {
    codes = static_cast<few::Codes>(1 + layer.format - moeq::sm90::kFormats);
    fp8.rounding[0] = fp8.rounding[1] =
        layer.dynamic != 0 ? moeq::sm90::ActScale::kToken : moeq::sm90::ActScale::kTensor;
    p.a1 = p.a2 = moeq::sm90::ActScale::kNone;
    const int tile = few::are_of_w4a8(codes) ? 128 : 64;
    p.inter = (p.inter + tile - 1) / tile * tile;
  }
  p.gathers = layer.gathers != 0;
  p.x_half = layer.half != 0;
  p.splits = p.x_half && p.a1 == moeq::sm90::ActScale::kNone && !few::rounds_hidden(codes);
  p.partition = {layer.sms, layer.sms == kWholeDevice};
  p.workspace = workspace;
  few::Plan plan;
  std::memset(&plan, 0, sizeof(plan));   // as memory may be that was never written
  bool fits = false;
  if (few::make_plan(p, codes, fp8, plan, fits) != cudaSuccess) {
    return -1;
  }
  // A launch that others may overlap has an exchange of its own.
  const void* own = p.partition.whole_device ? nullptr : workspace;
  return !fits ? 0 : plan.args.exchange == own && plan.args.epochs == nullptr ? found(plan) : -1;
}

// What one thread block works out, where `entries` are this rank's.
struct Shares {
  few::Work of[few::kShares];
};

Shares shares_of(const few::Plan& plan, int block, int entries) {
  this_block.x = block;
  this_grid.x = plan.grid;
  const bool whole = shares(plan) && entries == plan.args.slots;
  Shares found = {};
  for (int gemm = 0; gemm < 2; ++gemm) {
    found.of[gemm] = whole           ? few::share_of_whole(plan.args, gemm)
                     : gathers(plan) ? few::share_of<few::Kind::kGathered>(plan.args, gemm, entries)
                                     : few::share_of(plan.args, gemm, entries);
  }
  if (whole) {
    found.of[few::kSharedUnit] = few::share_of_whole(plan.args, few::kSharedUnit);
  }
  return found;
}

// How often each tile of K of each row tile of each entry is multiplied, in one GEMM.
class Counts {
 public:
  Counts(int entries, int row_tiles, int k_tiles)
      : entries_(entries), row_tiles_(row_tiles), k_tiles_(k_tiles), times_(entries * row_tiles * k_tiles) {}

  bool add(const few::Work& work) {
    const bool inside = work.entry >= 0 && work.entry < entries_ && work.row_tile >= 0 && work.row_tile < row_tiles_;
    for (int tile = 0; inside && tile < work.part_tiles; ++tile) {
      const int k = work.part * work.part_tiles + tile;
      if (k < k_tiles_) {
        ++times_[(work.entry * row_tiles_ + work.row_tile) * k_tiles_ + k];
      }
    }
    return inside && work.part >= 0 && work.stage_tiles > 0;
  }

  bool all_once() const {
    for (const uint8_t times : times_) {
      if (times != 1) {
        return false;
      }
    }
    return true;
  }

 private:
  int entries_, row_tiles_, k_tiles_;
  std::vector<uint8_t> times_;
};

// Adds all units of a block. Group by group of warps, none may leave out all units of an operand but the last.
template <few::Kind kKind>
bool add_units(const few::Plan& plan, const Shares& shares, int gemm, Counts& counts) {
  const few::Work begin = few::first_unit<kKind>(shares.of, gemm);
  bool right = begin.count >= 0 && (begin.groups == 1 || begin.groups == 2);
  few::Work work = begin;
  for (int unit = 0; unit < begin.count; ++unit, few::next_unit<kKind>(shares.of, work, plan.args.row_tiles[gemm])) {
    right = right && counts.add(work) && work.groups == begin.groups && (work.part_bits >= 0 || unit == 0);
    const bool ends_operand = work.row_tile == plan.args.row_tiles[gemm] - 1 && unit + 1 < begin.count;
    right = right && (gemm == 0 || begin.groups == 1 || !ends_operand || unit > 0);
  }
  return right;
}

// The block that adds the sums of a unit finds those of part i in the i-th block after it.
bool parts_are_neighbours(const few::Plan& plan, int block, const few::Work& mine) {
  const int owner = block - mine.part;
  const few::Work first = owner < 0 ? few::Work{} : shares_of(plan, owner, plan.args.slots).of[few::kSharedUnit];
  return first.count > 0 && first.part == 0 && first.entry == mine.entry && first.row_tile == mine.row_tile &&
         mine.part < 1 << -mine.part_bits && mine.part_bits == first.part_bits;
}

template <few::Kind kKind>
bool deals_rightly(const few::Plan& plan, int entries) {
  bool right = true;
  for (int gemm = 0; gemm < 2; ++gemm) {
    Counts counts(entries, plan.args.row_tiles[gemm], plan.args.k_tiles[gemm]);
    int least = 1 << 30, most = 0;
    for (int block = 0; block < plan.grid; ++block) {
      const Shares found = shares_of(plan, block, entries);
      const few::Work first = few::first_unit<kKind>(found.of, gemm);
      right = right && add_units<kKind>(plan, found, gemm, counts);
      right = right && (first.part_bits >= 0 || parts_are_neighbours(plan, block, first));
      least = first.count < least ? first.count : least;
      most = first.count > most ? first.count : most;
    }
    right = right && counts.all_once() && most - least <= 1;
  }
  return right;
}

// Of all slots' experts and where some are another rank's.
bool deals_each_tile_once(const few::Plan& plan) {
  const int slots = plan.args.slots;
  for (const int entries : {slots, slots - 1, (slots + 1) / 2, slots / 3, 1, 0}) {
    if (entries >= 0 && entries <= slots &&
        !(shares(plan)    ? deals_rightly<few::Kind::kPlainShared>(plan, entries)
          : gathers(plan) ? deals_rightly<few::Kind::kGathered>(plan, entries)
                          : deals_rightly<few::Kind::kPlain>(plan, entries))) {
      return false;
    }
  }
  return true;
}

}  // namespace

// plan_few, deal_few: 0 where the kernel does not take the layer, -1 where something is wrong.

// Into how many parts units are cut that blocks share; 1: there are none.
extern "C" int plan_few(const Layer* layer) {
  return answer(*layer, [](const few::Plan& plan) {
    return !holds(plan) ? -1 : shares(plan) ? 1 << plan.args.whole[0].shared_bits : 1;
  });
}

// For how many rows that are gathered there is room; 0: none are.
extern "C" int gathers_few(const Layer* layer) {
  return answer(*layer, [](const few::Plan& plan) { return gathers(plan) ? plan.args.rows : 0; });
}

// Whether blocks share units (2) or not (1), and every tile is multiplied exactly once.
extern "C" int deal_few(const Layer* layer) {
  return answer(*layer, [](const few::Plan& plan) { return !deals_each_tile_once(plan) ? -1 : shares(plan) ? 2 : 1; });
}
