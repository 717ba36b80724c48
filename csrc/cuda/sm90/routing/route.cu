// Routing as a launch of its own: of logits, or of hidden states, with the router's product in it.
#include "route.cuh"
#include "route_hidden.cuh"
#include "../device/async.cuh"
#include "../launch/in_front.h"
#include "../launch/launches.h"

namespace moeq::sm90 {
namespace {

constexpr int kWarps = 4;

struct RouteArgs {
  Router router;
  SharedExperts shared;
  int tokens;
  int32_t* ids;
  float* weights;
};

template <int each>
__global__ void __launch_bounds__(32 * kWarps) route_kernel(const __grid_constant__ RouteArgs args) {
  __shared__ int chosen[kWarps][32];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t at = token * (args.router.top_k + args.shared.count);
  if (token >= args.tokens) return;
  route_by_warp<each>(args.router, token, chosen[threadIdx.x / 32], args.ids + at, args.weights + at);
  append_shared(args.router, args.shared, token, args.ids + at, args.weights + at);
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

cudaError_t route_run(const Router& router, const SharedExperts& shared, int tokens, int32_t* ids, float* weights,
                      cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const RouteArgs args = {router, shared, tokens, ids, weights};
  const int blocks = (tokens + kWarps - 1) / kWarps;
  const cudaError_t error = launch_after(kernel_for(router.experts), args, blocks, 32 * kWarps, 0, stream);
  if (error == cudaSuccess) note_trigger(stream);
  return error;
}

// Routing from hidden states, for few tokens: a cluster of blocks for every eight of them.
namespace {

using namespace hidden;

template <int each>
__global__ void __launch_bounds__(32 * kMaxWarps) route_hidden_kernel(const __grid_constant__ RouteHidden call) {
  __shared__ Shared s;
  const int rank = cluster_rank(), blocks = cluster_size(), warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int first = static_cast<int>(blockIdx.x) / blocks * kTokens;
  if (first == 0) prefetch_weights(call, chunks_of(call.hidden, rank, blocks));
  cluster_arrive_relaxed();
  wait_for_previous_kernel();
  allow_next_kernel();

  const Division division(call.router.experts, blocks);
  const bool shares = division.tiles <= warps;  // several warps share a tile, else a warp has several
  const int slice = shares ? warp / division.tiles : 0, part = rank * division.slices + slice;
  const Range chunks = chunks_of(call.hidden, part, division.parts);
  bool others_run = false;
  for (int tile = shares ? warp % division.tiles : warp; slice < division.slices && tile < division.tiles;
       tile += warps) {
    float sum[4] = {};
    multiply_tile(call, tile, first, chunks, sum);
    if (!others_run) cluster_wait();  // before their shared memory is written
    others_run = true;
    send_tile(call, s, division, tile, part, first, sum);
  }
  if (!others_run) cluster_wait();
  __syncwarp();
  cluster_arrive();
  cluster_wait();

  const int token = first + rank;
  if (rank >= kTokens || token >= call.tokens) return;
  add_parts(call, s, division, token);
  __syncthreads();
  if (warp == 0) choose<each>(call, s, token);
}

struct Kernel {
  void (*function)(RouteHidden);
  KnownDevices& has_large_clusters;
};

template <int each>
Kernel kernel() {
  static KnownDevices known;
  return {route_hidden_kernel<each>, known};
}

Kernel hidden_kernel_for(int experts) {
  return experts <= 32 ? kernel<1>() : experts <= 128 ? kernel<4>() : experts <= 256 ? kernel<8>() : kernel<16>();
}

}  // namespace

cudaError_t route_hidden_run(const RouteHidden& call, RouteHiddenPlan plan, cudaStream_t stream) {
  if (call.tokens == 0) return cudaSuccess;
  const Kernel kernel = hidden_kernel_for(call.router.experts);
  if (plan.blocks > kPortableCluster) {
    const void* function = reinterpret_cast<const void*>(kernel.function);
    const cudaError_t error = allow_large_clusters(function, kernel.has_large_clusters);
    if (error != cudaSuccess) return error;
  }
  const int clusters = (call.tokens + kTokens - 1) / kTokens;
  const cudaError_t error =
      launch_clusters_after(kernel.function, call, clusters, plan.blocks, 32 * plan.warps, stream);
  if (error == cudaSuccess) note_trigger(stream);
  return error;
}

}  // namespace moeq::sm90
