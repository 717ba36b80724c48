// How a layer of many tokens is cut: the workspace into arrays, the tokens into pieces whose arrays fit.
#pragma once
#include "problem.h"

namespace moeq::sm90 {

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
