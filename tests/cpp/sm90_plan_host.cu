// The host's plan of a decode launch for very few tokens behind a C interface, on a multiprocessor count and shared
// memory that the test gives: no GPU is asked.
#include <cstring>

#include <cuda_runtime.h>

namespace {

int multiprocessors, shared_memory;

cudaError_t no_device(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t given_attribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? multiprocessors : shared_memory;
  return cudaSuccess;
}

}  // namespace

#define cudaGetDevice no_device
#define cudaDeviceGetAttribute given_attribute
#include "../../csrc/cuda/sm90/decode_few_plan.cu"

namespace few = moeq::sm90::few;

namespace {

bool shares(const few::Plan& plan) {
  return plan.kind == few::Kind::kPlainShared || plan.kind == few::Kind::kQuantizedShared;
}

// All units are dealt, no block gets two parts, no part is empty, and their sums have room behind all others.
bool shares_rightly(const few::Plan& plan) {
  const few::Args& args = plan.args;
  const few::Deal& deal = args.whole[0];
  const int parts = 1 << deal.shared_bits, tiles = args.part_tiles[0][deal.shared_bits];
  const int64_t outputs = int64_t{args.slots} * args.row_tiles[1] * (moeq::sm90::kTileRows / 2);
  bool right = args.p.tokens == 1 && parts > 1 && deal.more > 0 && deal.more * parts <= plan.grid;
  right = right && deal.each * plan.grid + deal.more == args.slots * args.row_tiles[0];
  right = right && (parts - 1) * tiles < args.k_tiles[0];
  right = right && args.partials >= args.outputs + (outputs << args.part_bits[1][args.slots]);
  return right && args.partials + int64_t{plan.grid} * (moeq::sm90::kTileRows / 2) <= few::kExchangePairs;
}

// What every plan that fits must hold for.
bool holds(const few::Plan& plan) {
  const few::Args& args = plan.args;
  const int ring = args.stages * args.stage_tiles * few::kTileBytes;
  bool right = plan.shared_bytes == shared_memory && args.ring_offset + ring <= shared_memory;
  right = right && args.stages >= few::kLeastStages && args.stages <= few::kMaxStages;
  right = right && args.h_offset + args.h_buffers * args.columns * args.h_stride <= args.ring_offset;
  for (int entries = 1; entries <= args.slots; ++entries) {
    for (int gemm = 0; gemm < 2; ++gemm) {
      const int bits = args.part_bits[gemm][entries], tiles = args.part_tiles[gemm][bits];
      right = right && tiles << bits >= args.k_tiles[gemm];
      right = right && args.part_stage_tiles[gemm][bits] <= args.stage_tiles;
    }
    const int64_t outputs = int64_t{args.slots} * args.row_tiles[1] * (moeq::sm90::kTileRows / 2);
    right = right && args.outputs + (outputs << args.part_bits[1][entries]) <= few::kExchangePairs;
  }
  return right && (!shares(plan) || shares_rightly(plan));
}

}  // namespace

// 0: the kernel does not take the problem; else into how many parts units are cut that blocks share (1: there are
// none); -1: a plan that is wrong.
extern "C" int plan_few(int sms, int shared, int tokens, int top_k, int experts, int hidden, int inter, int gated,
                        int dynamic, int format) {
  multiprocessors = sms;
  shared_memory = shared;
  moeq::sm90::Problem p = {};
  p.tokens = tokens, p.top_k = top_k, p.experts = experts, p.hidden = hidden, p.inter = inter;
  p.gated = gated != 0;
  p.activation = p.gated ? moeq::sm90::Activation::kSilu : moeq::sm90::Activation::kRelu2NoMul;
  p.a1 = p.a2 = dynamic != 0 ? moeq::sm90::ActScale::kToken : moeq::sm90::ActScale::kNone;
  p.format = static_cast<moeq::sm90::Format>(format);
  few::Plan plan;
  std::memset(&plan, 0, sizeof(plan));   // as memory may be that was never written
  bool fits = false;
  if (few::make_plan(p, plan, fits) != cudaSuccess) {
    return -1;
  }
  return !fits ? 0 : !holds(plan) ? -1 : shares(plan) ? 1 << plan.args.whole[0].shared_bits : 1;
}
