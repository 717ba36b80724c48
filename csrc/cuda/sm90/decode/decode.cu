// Decode: a whole MoE layer of few tokens in one launch.
//
// One thread block per multiprocessor, all of them resident (a cooperative launch). Each works out the routing alone.
// The row tiles of all active experts are dealt out to the blocks; two warps of each copy them into a ring in shared
// memory, sixteen multiply them on the tensor cores. Two grid barriers: the intermediate must be complete before GEMM2
// multiplies it (its weights are under way by then), and GEMM2's sums before they are combined.
#include "../launch/launches.h"
#include "../decode_few/decode_few_e4m3.h"
#include "decode_plan.h"
#include "../layout/layout.h"
#include "../routing/route.cuh"

namespace moeq::sm90::decode {
namespace {

__device__ State whole_device_state;   // of launches that take the whole device

// Clears a launch's own state, in its workspace, or finds that of the whole device.
cudaError_t give_state(Args& args) {
  if (args.state != nullptr) {
    return cudaMemsetAsync(args.state, 0, sizeof(State), args.p.stream);
  }
  static KnownAddresses known;
  void* state = nullptr;
  const cudaError_t error = find_variable(whole_device_state, known, state);
  args.state = static_cast<State*>(state);
  return error;
}

}  // namespace
}  // namespace moeq::sm90::decode

namespace moeq::sm90 {

// Whether the kernel for very few tokens takes a problem, and how.
static cudaError_t make_few_plan(const RoundedProblem& p, few::Plan& plan, bool& few) {
  return rounds_to_e4m3(p) ? few::make_e4m3_plan(p, plan, few) : few::make_plan(p, plan, few);
}

// Beyond it, weights of 8 bits are for the prefill kernel for few tokens, all others for the kernel with grid barriers.
constexpr Shape kShapeOfBytes = Shape::kSlim;

int decode_max_tokens(const Problem& p) { return p.top_k < 1 ? 0 : decode::kMaxSlots / p.top_k; }

bool decode_takes_logits(const RoundedProblem& p) {
  few::Plan plan;
  bool few = false;
  return p.router.experts <= kRouteInPlace && make_few_plan(p, plan, few) == cudaSuccess && few;
}

size_t decode_workspace(const RoundedProblem& p) {
  few::Plan few_plan;
  bool few = false;
  if (make_few_plan(p, few_plan, few) != cudaSuccess || !few) {
    decode::Plan plan;
    return has_bytes(p.format)                         ? prefill_workspace(p, kShapeOfBytes)
           : decode::make_plan(p, plan) == cudaSuccess ? plan.workspace
                                                       : 0;
  }
  return p.partition.whole_device ? 0 : few::exchange_bytes(few_plan);
}

cudaError_t decode_run(const RoundedProblem& p) {
  if (p.tokens > decode_max_tokens(p)) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) {
    return cudaSuccess;
  }
  few::Plan few_plan;
  bool few = false;
  cudaError_t error = make_few_plan(p, few_plan, few);
  if (error != cudaSuccess || few) {
    return error != cudaSuccess ? error : rounds_to_e4m3(p) ? few::run_e4m3(few_plan) : few::run(few_plan);
  }
  if (has_bytes(p.format)) {
    return prefill_run(p, kShapeOfBytes);
  }
  decode::Plan plan;
  error = decode::make_plan(p, plan);
  if (error != cudaSuccess) {
    return error;
  }
  const void* kernel = decode::kernel_of(p.format, plan.groups);
  static KnownDevices known[kFormats][5];
  error = allow_shared_memory(kernel, plan.shared_bytes, known[static_cast<int>(p.format)][plan.groups]);
  if (error == cudaSuccess) {
    error = decode::give_state(plan.args);
  }
  if (error != cudaSuccess) {
    return error;
  }
  return launch_together(kernel, plan.args, plan.grid, decode::kBlockThreads, plan.shared_bytes, p.stream);
}

}  // namespace moeq::sm90
