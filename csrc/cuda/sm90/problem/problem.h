// What the Hopper kernels are asked to run: plain pointers and sizes, so that a test program needs no torch;
// and how a workspace is cut into arrays, and the tokens into pieces whose arrays fit.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

#include "../../../generated/activations.h"
#include "../../../generated/sm90.h"

namespace moeq::sm90 {

// Float32 scales of e4m3 and int8 weights, which multiply: that of row r of a half at expert * e + half * h + row * r;
// blocks: at expert * e + half * h + row * (r / 128) + K / 128.
struct WeightScales {
  const float* data;
  int64_t expert;
  int half, row;
  int rows;      // of a half, without padding
  bool blocks;
};

// How activations are quantized to NVFP4 before they are multiplied.
enum class ActScale : int { kNone, kTensor, kExpert, kToken };              // kNone: not at all (W4A16)

enum class OutType : int { kBfloat16, kFloat16, kFloat32 };

// What a stream's launches have of the GPU.
struct Partition {
  int multiprocessors;
  bool whole_device;  // all of the device's, and none under another process's share of it
};

// One layer's call. Weights of 4 bits lie in the layout of layout.h, those of 8 in that of w4a8_layout.h; everything
// else as the op has it, contiguous.
struct Problem {
  const uint8_t* w13;  // [experts, row_tiles13, k_tiles13, 2048]
  const uint8_t* w13_scale;  // [experts, row_tiles13, k_tiles13, 256]
  const uint8_t* w2;  // [experts, row_tiles2, k_tiles2, 2048]
  const uint8_t* w2_scale;  // [experts, row_tiles2, k_tiles2, 256]
  Format format;
  WeightScales scales13, scales2;  // of weights of 8 bits that have none in tiles
  const float* g1_alphas;  // [experts, alphas13]; null: 1
  int alphas13;  // 1, or 2: gate and up have one each
  const float* g2_alphas;  // [experts]; null: 1
  const float* w13_bias;  // [experts, 2 * inter] (gate, then up) or [experts, inter]; null: none
  const float* w2_bias;  // [experts, hidden]; null: none
  const void* x;  // [tokens, hidden], bfloat16, or float16 if x_half
  bool x_half;
  bool splits;  // float16 hidden states and intermediates are multiplied, as two bfloat16 each
                // (numerics/act_rounding.cuh)
  const int32_t* topk_ids;  // [tokens, top_k]; outside [offset, offset + experts): contributes nothing
  const float* topk_weights;  // [tokens, top_k]
  void* out;  // [tokens, hidden] of out_type
  OutType out_type;
  int tokens, top_k, experts, expert_offset, hidden, inter;
  Activation activation;
  bool gated;
  bool gathers;  // the decode kernel without grid barriers may gather rows (few::Kind::kGathered)
  float alpha, beta, limit;  // of the activation; limit may be infinite
  bool weight_on_input;  // the router weight multiplies the token (rounded to its type), top_k is 1
  ActScale a1, a2;  // of the hidden states and of the intermediate
  const float* a1_gscale;  // kTensor: [1], kExpert: [experts], else null
  const float* a2_gscale;
  void* workspace;  // of the size that *_workspace(problem) says; contents undefined, need not survive
  cudaStream_t stream;
  Partition partition;  // the stream's
};

// Rows of a GEMM's operand that a slot has.
__host__ __device__ inline int rows_of_slot(const Problem& p) { return p.splits ? 2 : 1; }

// A layer of bfloat16 weights as the checkpoint has them: w13 [experts, rows, hidden], w2 [experts, hidden, inter].
// As prefill_run does, of a problem without scales and without quantization; `format` says nothing here.
size_t bf16_workspace(const Problem& p);
cudaError_t bf16_run(const Problem& p);

// What a stream's launches have of the GPU: all multiprocessors, those of a green context, or a share under MPS. Of
// the current device's stream. Asked at each call, as a stream's handle may be used again for another context's.
cudaError_t partition_of(cudaStream_t stream, Partition& partition);

// Hands out pieces of the workspace; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<uint8_t*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

// Tokens of a piece whose longest array has about 1 GB, or all of them: at least 256, and a multiple of it.
inline int tokens_at_once(const Problem& p, int64_t bytes_of_token) {
  constexpr int64_t kPieceBytes = int64_t{1} << 30;
  const int64_t tokens = kPieceBytes / bytes_of_token / 256 * 256;
  return static_cast<int>(tokens < 256 ? 256 : tokens < p.tokens ? tokens : p.tokens);
}

template <class AnyProblem>
AnyProblem piece_of(const AnyProblem& p, int first, int count) {
  AnyProblem piece = p;
  const int64_t row = int64_t{first} * p.hidden;
  piece.tokens = count;
  piece.x = static_cast<const uint16_t*>(p.x) + row;
  piece.topk_ids = p.topk_ids + int64_t{first} * p.top_k;
  piece.topk_weights = p.topk_weights + int64_t{first} * p.top_k;
  piece.out = static_cast<uint8_t*>(p.out) + row * (p.out_type == OutType::kFloat32 ? 4 : 2);
  return piece;
}

// run_piece(problem of at most `step` tokens), one after another.
template <class AnyProblem, class RunPiece>
cudaError_t run_in_pieces(const AnyProblem& p, int step, RunPiece run_piece) {
  for (int first = 0; first < p.tokens; first += step) {
    const int left = p.tokens - first;
    const cudaError_t error = run_piece(piece_of(p, first, left < step ? left : step));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace moeq::sm90
