// What both ops check of the group that they are given, and how they launch.
#pragma once
#include <algorithm>

#include "../../check.h"
#include "../launch.cuh"
#include "buffer.cuh"
#include "placing.cuh"

namespace moeq::ep {

// buffers: int64 [size] on the CPU, addresses of the ranks' Buffers as this rank's GPU has them; limit: seconds.
inline Ranks ranks_of(const char* op, const Tensor& buffers, int64_t rank, double limit) {
  MOEQ_CHECK(
      op,
      buffers.is_cpu() && buffers.dim() == 1 && buffers.is_contiguous() && buffers.scalar_type() == ScalarType::Long,
      "buffers must be a contiguous vector of int64 on the CPU");
  const int64_t size = buffers.size(0);
  MOEQ_CHECK(op, size >= 1 && size <= kMostRanks, "buffers must have 1 to ", kMostRanks, " elements, got ", size);
  MOEQ_CHECK(op, rank >= 0 && rank < size, "rank must be in 0 ... ", size - 1, ", got ", rank);
  MOEQ_CHECK(op, limit > 0 && limit < 1e9, "limit must be a positive number of seconds, got ", limit);
  Ranks ranks{{}, static_cast<int>(rank), static_cast<int>(size), static_cast<uint64_t>(limit * 1e9)};
  const auto* addresses = static_cast<const int64_t*>(buffers.const_data_ptr());
  std::copy(addresses, addresses + size, ranks.buffers);
  return ranks;
}

// Whether `vectors` of each rank are few enough to go as words: at most `few` bytes, which is the same on all ranks.
inline bool as_words(const char* op, int64_t vectors, int64_t few) {
  MOEQ_CHECK(op, few >= 0, "few must be at least 0, got ", few);
  constexpr int64_t kMost = static_cast<int64_t>(kWordBlocks) * kWordThreads;
  return vectors <= kMost && vectors * 16 <= few;
}

inline unsigned word_blocks(int64_t vectors) {
  return static_cast<unsigned>((vectors + kWordThreads - 1) / kWordThreads);
}

// A kernel that may begin before the previous one of the stream has ended, where its code waits for that.
template <class Args>
void launch_early(void (*kernel)(Args), const Args& args, unsigned blocks, int threads, cudaStream_t stream) {
  cudaFuncAttributes found{};
  STD_CUDA_CHECK(cudaFuncGetAttributes(&found, kernel));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = found.ptxVersion >= 90 ? 1 : 0;  // of the architecture that it was compiled for
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

template <class Args>
void launch_words(void (*kernel)(Args), const Args& args, cudaStream_t stream) {
  launch_early(kernel, args, word_blocks(args.share.vectors), kWordThreads, stream);
}

using OptionalTensor = std::optional<Tensor>;

// The tables of ExpertParallel, or none of them.
inline Placing placing_of(const char* op, const OptionalTensor& first, const OptionalTensor& count,
                          const OptionalTensor& slots, const OptionalTensor& load, int64_t rank) {
  const bool given = first.has_value();
  MOEQ_CHECK(op, given == count.has_value() && given == slots.has_value() && given == load.has_value(),
             "first, count, slots and load must be given together");
  if (!given) {
    return {};
  }
  for (const Tensor* t : {&*first, &*count, &*slots, &*load}) {
    const ScalarType wanted = t == &*load ? ScalarType::Long : ScalarType::Int;
    MOEQ_CHECK(op, t->is_cuda() && t->dim() == 1 && t->is_contiguous() && t->scalar_type() == wanted && t->numel() > 0,
               "first, count and slots must be contiguous int32 vectors, load one of int64, not empty");
  }
  MOEQ_CHECK(op, first->size(0) == count->size(0) && first->size(0) == load->size(0),
             "first, count and load must have an element for each expert");
  return {static_cast<const int32_t*>(first->const_data_ptr()),
          static_cast<const int32_t*>(count->const_data_ptr()),
          static_cast<const int32_t*>(slots->const_data_ptr()),
          static_cast<unsigned long long*>(load->mutable_data_ptr()),
          static_cast<int>(first->size(0)),
          static_cast<int>(slots->size(0)),
          static_cast<int>(rank)};
}

inline bool aligned16(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

}  // namespace moeq::ep
