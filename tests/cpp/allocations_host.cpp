// Prints how often calls of the experts allocate: the first one, and each of three that follow. What an instruction
// set computes is left out.
#include <cstdio>
#include <cstdlib>
#include <new>

static int64_t allocations = 0;

#include "../../csrc/cpu/chunk_gemm.cpp"
#include "../../csrc/cpu/chunk_rows.cpp"
#include "../../csrc/cpu/cores.cpp"
#include "../../csrc/cpu/experts.cpp"
#include "../../csrc/cpu/helpers.cpp"
#include "../../csrc/cpu/routing.cpp"

void* operator new(std::size_t size) {
  ++allocations;
  return std::malloc(size);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }

int main() {
  using namespace moeq::cpu;
  constexpr int64_t kTokens = 5, kTopK = 2, kHidden = 64, kInter = 32, kExperts = 4;
  IsaTable isa{};
  isa.name = "none";
  isa.tile = kMaxTile;
  isa.load_row = [](const uint8_t*, DType, int64_t, const float*, float*) {};
  isa.quantize_row = [](const RowCall&) {};
  isa.glu = [](const GluCall&) {};
  isa.scale = [](const ScaleCall&) {};
  isa.combine = [](const CombineCall&) {};
  const Dot dot = {[](const DotCall&) {}};
  float rows[kTokens * kHidden] = {}, out[kTokens * kHidden] = {}, weights[kTokens * kTopK] = {};
  int32_t ids[kTokens * kTopK];
  ExpertsArgs args;
  args.hidden = reinterpret_cast<const uint8_t*>(rows);
  args.out = out;
  args.topk_ids = ids;
  args.topk_weights = weights;
  args.num_tokens = kTokens;
  args.top_k = kTopK;
  args.hidden_size = kHidden;
  args.num_experts = kExperts;
  args.w13.halves = 2;
  args.w13.panels = 2 * kInter / kPanelRows;
  args.w13.units = kHidden / kUnit;
  args.w2.panels = kHidden / kPanelRows;
  args.w2.units = kInter / kUnit;
  const Parallel alone = {1, nullptr};
  for (int call = 0; call < 4; ++call) {
    for (int i = 0; i < kTokens * kTopK; ++i) ids[i] = (i + call) % kExperts;
    const int64_t before = allocations;
    run_experts(args, isa, dot, alone);
    std::printf("%lld ", static_cast<long long>(allocations - before));
  }
  return 0;
}
