// Routing as a launch of its own: before the prefill kernels, and before a decode launch that does not route by itself.
#include "../launch/launches.h"
#include "../device/async.cuh"
#include "route.cuh"

namespace moeq::sm90 {
namespace {

constexpr int kWarps = 4;

struct RouteArgs {
  Router router;
  int tokens;
  int32_t* ids;
  float* weights;
};

template <int each>
__global__ void __launch_bounds__(32 * kWarps) route_kernel(const __grid_constant__ RouteArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, at = token * args.router.top_k;
  if (token >= args.tokens) return;
  route_by_warp<each, (each <= 16)>(args.router, token, args.ids + at, args.weights + at, [] {});
}

using RouteKernel = void (*)(RouteArgs);

RouteKernel kernel_for(int experts) {
  return experts <= 32     ? route_kernel<1>
         : experts <= 128  ? route_kernel<4>
         : experts <= 256  ? route_kernel<8>
         : experts <= 512  ? route_kernel<16>
         : experts <= 1024 ? route_kernel<32>
                           : route_kernel<64>;
}

}  // namespace

cudaError_t route_run(const Problem& p, int32_t* ids, float* weights) {
  if (p.tokens == 0) return cudaSuccess;
  const RouteArgs args = {p.router, p.tokens, ids, weights};
  const int blocks = (p.tokens + kWarps - 1) / kWarps;
  return launch_after(kernel_for(p.router.experts), args, blocks, 32 * kWarps, 0, p.stream);
}

}  // namespace moeq::sm90
