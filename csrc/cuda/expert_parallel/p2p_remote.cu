// moeq_C::ep_p2p_stage and ep_p2p_sum: around experts that exchange rows by themselves.
#include <torch/csrc/stable/library.h>

#include "exchange.cuh"
#include "out_type.cuh"
#include "remote.cuh"

namespace moeq::ep {
namespace {

// Each has rounds of its own in a Buffer.
constexpr unsigned kAllBlocks = kBlocks;

// heaps: as `buffers` of ranks_of; sizes: bytes of tokens, of places and of weights that a heap has room for.
Heaps heaps_of(const char* op, const Tensor& heaps, const Tensor& sizes, const Ranks& ranks) {
  MOEQ_CHECK(op,
             heaps.is_cpu() && heaps.dim() == 1 && heaps.is_contiguous() && heaps.scalar_type() == ScalarType::Long &&
                 heaps.size(0) == ranks.size,
             "heaps must be a vector of ", ranks.size, " int64 on the CPU");
  MOEQ_CHECK(op,
             sizes.is_cpu() && sizes.dim() == 1 && sizes.is_contiguous() && sizes.scalar_type() == ScalarType::Long &&
                 sizes.size(0) == 3,
             "sizes must be a vector of 3 int64 on the CPU");
  Heaps found{};
  const auto* addresses = static_cast<const int64_t*>(heaps.const_data_ptr());
  const auto* bytes = static_cast<const int64_t*>(sizes.const_data_ptr());
  for (int i = 0; i < 3; ++i) {
    MOEQ_CHECK(op, bytes[i] >= 0 && bytes[i] % 128 == 0, "sizes must be multiples of 128, got ", bytes[i]);
  }
  std::copy(addresses, addresses + ranks.size, found.addresses);
  found.places_at = bytes[0];
  found.weights_at = found.places_at + bytes[1];
  found.parts_at = found.weights_at + bytes[2];
  return found;
}

constexpr const char* kStage = "ep_p2p_stage";
constexpr const char* kSum = "ep_p2p_sum";

// tokens [n, hidden_size] of 16-bit numbers, ids int32 and weights float32 [n, top_k] of this rank; places int32
// [n, top_k], filled. first, count, slots and load: of placing.cuh, absent where ids are places.
void stage(const Tensor& tokens, const Tensor& ids, const Tensor& weights, const Tensor& places, const Tensor& buffers,
           const Tensor& heaps, const Tensor& sizes, int64_t rank, int64_t max_tokens, double limit,
           const OptionalTensor& first, const OptionalTensor& count, const OptionalTensor& slots,
           const OptionalTensor& load) {
  const Ranks ranks = ranks_of(kStage, buffers, rank, limit);
  const Heaps at = heaps_of(kStage, heaps, sizes, ranks);
  for (const auto& [name, t] :
       {std::pair{"tokens", &tokens}, {"ids", &ids}, {"weights", &weights}, {"places", &places}}) {
    MOEQ_CHECK(kStage, t->is_cuda() && t->dim() == 2 && t->is_contiguous() && aligned16(*t), name,
               " must be a contiguous CUDA matrix at a multiple of 16 bytes");
  }
  const int64_t tokens_here = tokens.size(0), top_k = ids.size(1);
  const int64_t bytes = tokens.numel() * static_cast<int64_t>(tokens.element_size());
  const int64_t row_bytes = tokens.size(1) * static_cast<int64_t>(tokens.element_size());
  MOEQ_CHECK(kStage,
             tokens_here <= max_tokens && max_tokens >= 1 && max_tokens * ranks.size * top_k < (int64_t{1} << 31),
             "max_tokens must be in ", tokens_here, " ... 2^31 - 1 slots, got ", max_tokens);
  MOEQ_CHECK(kStage,
             ids.scalar_type() == ScalarType::Int && places.scalar_type() == ScalarType::Int &&
                 weights.scalar_type() == ScalarType::Float && ids.size(0) == tokens_here &&
                 places.size(0) == tokens_here && places.size(1) == top_k && weights.size(0) == tokens_here &&
                 weights.size(1) == top_k,
             "ids, places and weights must be int32, int32 and float32 [", tokens_here, ", ", top_k, "]");
  MOEQ_CHECK(kStage, row_bytes % 16 == 0, "rows of tokens must be multiples of 16 bytes, got ", row_bytes);
  MOEQ_CHECK(kStage, max_tokens * row_bytes <= at.places_at, "tokens must have room in the heap: ", at.places_at,
             " bytes, got ", max_tokens * row_bytes);
  const int64_t all = max_tokens * ranks.size * top_k;
  MOEQ_CHECK(kStage, all * 4 <= at.weights_at - at.places_at && all * 4 <= at.parts_at - at.weights_at,
             "places must have room in the heap, got ", all);
  const StageArgs args{static_cast<const uint4*>(tokens.const_data_ptr()),
                       bytes / 16,
                       static_cast<const int32_t*>(ids.const_data_ptr()),
                       static_cast<const float*>(weights.const_data_ptr()),
                       static_cast<int32_t*>(places.mutable_data_ptr()),
                       static_cast<int>(tokens_here),
                       static_cast<int>(max_tokens),
                       static_cast<int>(top_k),
                       at,
                       ranks,
                       placing_of(kStage, first, count, slots, load, rank)};
  const torch::stable::accelerator::DeviceGuard guard(tokens.get_device_index());
  launch_early(stage_kernel, args, kAllBlocks, kRemoteThreads, current_stream(tokens));
}

template <class Element>
void launch_sum(const SumArgs& args, cudaStream_t stream) {
  if (args.ranks.size <= 2) {
    launch_early(sum_kernel<Element, 2>, args, kAllBlocks, kRemoteThreads, stream);
  } else if (args.ranks.size <= 4) {
    launch_early(sum_kernel<Element, 4>, args, kAllBlocks, kRemoteThreads, stream);
  } else {
    launch_early(sum_kernel<Element, 8>, args, kAllBlocks, kRemoteThreads, stream);
  }
}

// parts [size * max_tokens, hidden_size]: the heap's; places int32 [tokens, top_k] and out [tokens, hidden_size] of
// this rank's tokens; ends: int64 [size] on the CPU, where each rank's places end.
void sum(const Tensor& parts, const Tensor& places, const Tensor& out, const Tensor& ends, const Tensor& buffers,
         const Tensor& heaps, const Tensor& sizes, int64_t rank, double limit) {
  const Ranks ranks = ranks_of(kSum, buffers, rank, limit);
  const Heaps at = heaps_of(kSum, heaps, sizes, ranks);
  for (const auto& [name, t] : {std::pair{"parts", &parts}, {"places", &places}, {"out", &out}}) {
    MOEQ_CHECK(kSum, t->is_cuda() && t->dim() == 2 && t->is_contiguous() && aligned16(*t), name,
               " must be a contiguous CUDA matrix at a multiple of 16 bytes");
  }
  MOEQ_CHECK(kSum, reinterpret_cast<int64_t>(parts.const_data_ptr()) == at.addresses[ranks.rank] + at.parts_at,
             "parts must be those of this rank's heap");
  const int64_t hidden = parts.size(1), of_rank = parts.size(0) / ranks.size, tokens = out.size(0);
  const int64_t row_bytes = hidden * static_cast<int64_t>(parts.element_size());
  MOEQ_CHECK(kSum, of_rank >= 1 && of_rank * ranks.size == parts.size(0) && of_rank < (int64_t{1} << 31),
             "parts.shape[0] must be a multiple of ", ranks.size, ", got ", parts.size(0));
  MOEQ_CHECK(kSum, hidden % 8 == 0, "parts.shape[1] must be a multiple of 8, got ", hidden);
  MOEQ_CHECK(kSum, out.size(1) == hidden && tokens <= of_rank, "out must be [at most ", of_rank, ", ", hidden, "]");
  MOEQ_CHECK(kSum, places.scalar_type() == ScalarType::Int && places.size(0) == tokens, "places must be int32 of ",
             tokens, " rows, got ", places.size(0));
  MOEQ_CHECK(kSum,
             ends.is_cpu() && ends.dim() == 1 && ends.is_contiguous() && ends.scalar_type() == ScalarType::Long &&
                 ends.size(0) == ranks.size,
             "ends must be a vector of ", ranks.size, " int64 on the CPU");
  SumArgs args{static_cast<const int32_t*>(places.const_data_ptr()),
               out.mutable_data_ptr(),
               out_type_of(kSum, out),
               static_cast<int>(tokens),
               static_cast<int>(of_rank),
               static_cast<int>(places.size(1)),
               static_cast<int>(row_bytes / 16),
               {},
               at,
               ranks};
  const auto* of_ranks = static_cast<const int64_t*>(ends.const_data_ptr());
  std::copy(of_ranks, of_ranks + ranks.size, args.ends);
  const torch::stable::accelerator::DeviceGuard guard(parts.get_device_index());
  const cudaStream_t stream = current_stream(parts);
  with_element(kSum, parts, [&](auto element) { launch_sum<decltype(element)>(args, stream); });
}

}  // namespace
}  // namespace moeq::ep

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("ep_p2p_stage", TORCH_BOX(&moeq::ep::stage));
  m.impl("ep_p2p_sum", TORCH_BOX(&moeq::ep::sum));
}
