// GEMM1's operand beside bfloat16 weights: tokens gathered by expert, K in its own order and padded.
#include "../device/async.cuh"
#include "../prefill/prefill_kernels.cuh"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;   // values of a thread: 16 bytes

__device__ uint4 load_piece(const Problem& p, int token, int column) {
  if (column >= p.hidden) return make_uint4(0, 0, 0, 0);
  uint4 piece = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.x) +
                                                static_cast<int64_t>(token) * p.hidden + column);
  if (p.weight_on_input) {
    __nv_bfloat16* values = reinterpret_cast<__nv_bfloat16*>(&piece);
    const float weight = p.topk_weights[token];
#pragma unroll
    for (int i = 0; i < kPiece; i++) values[i] = __float2bfloat16_rn(__bfloat162float(values[i]) * weight);
  }
  return piece;
}

// 16 bytes of a token for each of its experts, where wgmma's swizzle has them in the row.
__global__ void __launch_bounds__(kThreads) operand_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Problem& p = args.problem;
  const int pieces = args.hidden_padded / kPiece;
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (unit >= int64_t{p.tokens} * pieces) return;
  const int token = unit / pieces, piece = unit % pieces;
  const uint4 values = load_piece(p, token, piece * kPiece);
  __nv_bfloat16* k_tile = args.operand + int64_t{piece / 8} * args.rows * 64;
#pragma unroll 4
  for (int j = 0; j < p.top_k; j++) {
    const int64_t slot = int64_t{token} * p.top_k + j;
    const auto [expert, rank] = args.schedule.rank[slot];
    if (expert < 0) continue;
    const int row = args.schedule.first_row[expert] + rank;
    if (piece == 0) args.schedule.slot_of_row[row] = slot;
    *reinterpret_cast<uint4*>(k_tile + int64_t{row} * 64 + (piece % 8 ^ row % 8) * 8) = values;
  }
}

}  // namespace

cudaError_t launch_bf16_operand(const OperandArgs& args) {
  const int64_t units = int64_t{args.problem.tokens} * (args.hidden_padded / kPiece);
  return launch_dependent(operand_kernel, args, static_cast<unsigned>((units + kThreads - 1) / kThreads), kThreads, 0);
}

}  // namespace moeq::sm90
