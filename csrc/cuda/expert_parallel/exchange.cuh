// What both ops check of the group that they are given.
#pragma once
#include "../../check.h"
#include "../launch.cuh"
#include "buffer.cuh"

namespace moeq::ep {

// buffers: int64 [size], addresses of the ranks' Buffers in the memory of this rank's GPU; limit: seconds.
inline Ranks ranks_of(const char* op, const Tensor& buffers, int64_t rank, double limit) {
  MOEQ_CHECK(
      op,
      buffers.is_cuda() && buffers.dim() == 1 && buffers.is_contiguous() && buffers.scalar_type() == ScalarType::Long,
      "buffers must be a contiguous CUDA vector of int64");
  const int64_t size = buffers.size(0);
  MOEQ_CHECK(op, size >= 1 && size <= kMostRanks, "buffers must have 1 to ", kMostRanks, " elements, got ", size);
  MOEQ_CHECK(op, rank >= 0 && rank < size, "rank must be in 0 ... ", size - 1, ", got ", rank);
  MOEQ_CHECK(op, limit > 0 && limit < 1e9, "limit must be a positive number of seconds, got ", limit);
  return Ranks{static_cast<const int64_t*>(buffers.const_data_ptr()), static_cast<int>(rank), static_cast<int>(size),
               static_cast<uint64_t>(limit * 1e9)};
}

inline bool aligned16(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

}  // namespace moeq::ep
