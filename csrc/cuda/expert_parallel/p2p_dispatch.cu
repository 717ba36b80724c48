// moeq_C::ep_p2p_dispatch, and the size of the buffers that it wants.
#include <torch/csrc/stable/library.h>

#include "dispatch.cuh"
#include "exchange.cuh"

namespace moeq::ep {
namespace {

constexpr const char* kOp = "ep_p2p_dispatch";

void check_pair(const char* name, const Tensor& given, const Tensor& received, int64_t tokens, int64_t rows) {
  MOEQ_CHECK(kOp, given.is_cuda() && given.dim() == 2 && given.is_contiguous() && aligned16(given), name,
             " must be a contiguous CUDA matrix at a multiple of 16 bytes");
  MOEQ_CHECK(kOp, received.is_cuda() && received.dim() == 2 && received.is_contiguous() && aligned16(received), name,
             "_out must be a contiguous CUDA matrix at a multiple of 16 bytes");
  MOEQ_CHECK(kOp, given.size(0) == tokens, name, " must have ", tokens, " rows, got ", given.size(0));
  MOEQ_CHECK(kOp, received.size(0) == rows, name, "_out must have ", rows, " rows, got ", received.size(0));
  MOEQ_CHECK(kOp, received.scalar_type() == given.scalar_type() && received.size(1) == given.size(1), name,
             "_out must have the dtype and the columns of ", name);
}

// Appends to the range of vectors.
Segment segment_of(const Tensor& given, const Tensor& received, int64_t max_tokens, uint32_t fill, int64_t& vectors) {
  const int64_t row_bytes = given.size(1) * static_cast<int64_t>(given.element_size());
  Segment segment{static_cast<const uint8_t*>(given.const_data_ptr()),
                  static_cast<uint8_t*>(received.mutable_data_ptr()),
                  row_bytes,
                  max_tokens * row_bytes,
                  vectors,
                  fill};
  vectors += (segment.part_bytes + 15) / 16;
  return segment;
}

void launch(const DispatchArgs& args, int64_t few, cudaStream_t stream) {
  if (!as_words(kOp, args.share.vectors, few)) {
    dispatch_kernel<<<args.share.blocks(), kBlockThreads, 0, stream>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  } else if (args.ranks.size <= 2) {
    launch_words(dispatch_words_kernel<2>, args, stream);
  } else if (args.ranks.size <= 4) {
    launch_words(dispatch_words_kernel<4>, args, stream);
  } else {
    launch_words(dispatch_words_kernel<8>, args, stream);
  }
}

// x [tokens, ...], scale [tokens, ...] or nothing, ids [tokens, k], weights [tokens, k] of this rank; the same of all
// ranks, max_tokens rows of each, in the four that follow: rows of no token are zero, their ids -1.
void dispatch(const Tensor& x, const std::optional<Tensor>& scale, const Tensor& ids, const Tensor& weights,
              const Tensor& x_out, const std::optional<Tensor>& scale_out, const Tensor& ids_out,
              const Tensor& weights_out, const Tensor& buffers, int64_t rank, int64_t max_tokens, double limit,
              int64_t few) {
  const Ranks ranks = ranks_of(kOp, buffers, rank, limit);
  const int64_t tokens = x.size(0), rows = max_tokens * ranks.size;
  MOEQ_CHECK(kOp, tokens <= max_tokens && max_tokens >= 1 && max_tokens < (int64_t{1} << 31), "max_tokens must be in ",
             tokens, " ... 2^31 - 1, got ", max_tokens);
  MOEQ_CHECK(kOp, scale.has_value() == scale_out.has_value(), "scale_out must be given where scale is");
  check_pair("x", x, x_out, tokens, rows);
  check_pair("ids", ids, ids_out, tokens, rows);
  check_pair("weights", weights, weights_out, tokens, rows);
  if (scale.has_value()) {
    check_pair("scale", *scale, *scale_out, tokens, rows);
  }
  int64_t vectors = 0;
  const Segment of_ids = segment_of(ids, ids_out, max_tokens, 0xffffffffu, vectors);
  const Segment of_weights = segment_of(weights, weights_out, max_tokens, 0, vectors);
  const Segment of_x = segment_of(x, x_out, max_tokens, 0, vectors);
  Segment of_scale{};
  of_scale.first = vectors;
  if (scale.has_value()) {
    of_scale = segment_of(*scale, *scale_out, max_tokens, 0, vectors);
  }
  const DispatchArgs args{
      {of_ids, of_weights, of_x, of_scale}, ranks, Share(vectors, kStepVectors), static_cast<uint32_t>(tokens)};
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  launch(args, few, current_stream(x));
}

int64_t buffer_bytes() { return sizeof(Buffer); }

}  // namespace
}  // namespace moeq::ep

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) { m.impl("ep_p2p_dispatch", TORCH_BOX(&moeq::ep::dispatch)); }
STABLE_TORCH_LIBRARY_IMPL(moeq_C, CompositeExplicitAutograd, m) {
  m.impl("ep_p2p_buffer_bytes", TORCH_BOX(&moeq::ep::buffer_bytes));
}
