// Rows of a call in the memory of several GPUs of one host, which all of them map: with expert parallelism, tokens are
// read where their rank has them, and each partial row is written to the rank whose token it is of.
#pragma once
#include <cstdint>

namespace moeq::sm90 {

constexpr int kMostRemoteRanks = 8;

// Token t of the call is row t / ranks of rank t % ranks, so that any range of tokens is spread over all links.
struct RemoteRows {
  int64_t x[kMostRemoteRanks];    // addresses: each rank's tokens, [rows, hidden]
  int64_t out[kMostRemoteRanks];  // addresses at each rank: what this rank gives it, [rows, hidden]
  int ranks;                      // 0: rows are those of the Problem
  int first;                      // the call's number of the piece's first token
};

struct RemoteRow {
  int rank;
  int64_t row;
};

#ifdef __CUDACC__
__device__ __forceinline__ RemoteRow remote_row(const RemoteRows& remote, int token) {
  const int of_call = remote.first + token;
  return {of_call % remote.ranks, of_call / remote.ranks};
}
#endif

}  // namespace moeq::sm90
