// The decode of very few tokens behind a router that is multiplied in the same launch, and what the host says to it.
#include "../launch/launches.h"
#include "decode_few_kernel.cuh"
#include "decode_few_product.cuh"

namespace moeq::sm90::few {
namespace {

template <class Format, Kind kKind>
__global__ void __launch_bounds__(kBlockThreads, 1) decode_few_routed_kernel(const __grid_constant__ RoutedArgs all) {
  run_block<Format, kKind>(all.args, OwnLogits{all});
}

template <class Format, Kind kKind>
const void* routed() {
  return reinterpret_cast<const void*>(decode_few_routed_kernel<Format, kKind>);
}

template <class Format>
const void* routed_of(Kind kind) {
  return kind == Kind::kPlain         ? routed<Format, Kind::kPlain>()
         : kind == Kind::kPlainShared ? routed<Format, Kind::kPlainShared>()
                                      : routed<Format, Kind::kGeneral>();
}

bool has_kernel(const Problem& p) { return !p.x_half && (p.format == Format::kNvfp4 || p.format == Format::kMxfp4); }

// There is none for rounding to NVFP4 with given scales: it would have to divide the work as that of a routed call
// does.
bool has_kernel(Kind kind) { return kind != Kind::kQuantized && kind != Kind::kQuantizedShared; }

}  // namespace

cudaError_t make_routed_plan(const Problem& p, const RouterProduct& product, RoutedPlan& plan, bool& fits) {
  fits = has_kernel(p) && p.router.experts <= kRouterRows * p.partition.multiprocessors &&
         product.parts <= kMaxRouterParts && p.router.experts <= kRouteInPlace;
  if (!fits) return cudaSuccess;
  const cudaError_t error = make_plan(p, plan.plan, fits);
  if (error != cudaSuccess || !fits) return error;
  const int rows = ceil_div(p.router.experts, plan.plan.grid),
            room = plan.plan.shared_bytes - plan.plan.args.ring_offset;
  fits = rows * plan.plan.args.x_stride <= room;  // the router lies there first
  if (!fits) return cudaSuccess;
  plan.product = product;
  plan.product.inverse_parts = 1.0f / static_cast<float>(product.parts);
  plan.logits = static_cast<int>(2 * plan.plan.exchange_pairs);
  plan.plan.exchange_pairs += ceil_div(p.tokens * p.router.experts, 2);
  fits = has_kernel(plan.plan.kind) && plan.plan.exchange_pairs <= static_cast<size_t>(kExchangePairs);
  return cudaSuccess;
}

cudaError_t run_routed(RoutedPlan& plan) {
  static KnownDevices known[kFormats][kKinds];
  const Problem& p = plan.plan.args.p;
  const Kind kind = plan.plan.kind;
  const void* kernel = p.format == Format::kMxfp4 ? routed_of<Mxfp4Format>(kind) : routed_of<Nvfp4Format>(kind);
  RoutedArgs all{plan.plan.args, plan.product, plan.logits};
  cudaError_t error =
      allow_shared_memory(kernel, plan.plan.shared_bytes, known[static_cast<int>(p.format)][static_cast<int>(kind)]);
  if (error == cudaSuccess) error = give_exchange(plan.plan, all.args);
  if (error != cudaSuccess) return error;
  return launch_together(kernel, all, plan.plan.grid, kBlockThreads, plan.plan.shared_bytes, p.stream);
}

}  // namespace moeq::sm90::few
