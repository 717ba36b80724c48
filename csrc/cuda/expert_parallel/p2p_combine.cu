// moeq_C::ep_p2p_combine.
#include <torch/csrc/stable/library.h>

#include "combine.cuh"
#include "exchange.cuh"
#include "out_type.cuh"

namespace moeq::ep {
namespace {

constexpr const char* kOp = "ep_p2p_combine";

template <class Element, int most_ranks>
void launch(CombineArgs args, int64_t few, cudaStream_t stream) {
  if (as_words(kOp, args.share.vectors, few)) {
    return launch_words(combine_words_kernel<Element, most_ranks>, args, stream);
  }
  args.share = Share(args.share.vectors, Step<most_ranks>::kVectors);
  combine_kernel<Element, most_ranks><<<args.share.blocks(), kBlockThreads, 0, stream>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class Element>
void launch_for(const CombineArgs& args, int64_t few, cudaStream_t stream) {
  if (args.ranks.size <= 2) {
    launch<Element, 2>(args, few, stream);
  } else if (args.ranks.size <= 4) {
    launch<Element, 4>(args, few, stream);
  } else {
    launch<Element, 8>(args, few, stream);
  }
}

// partial [size * max_tokens, hidden_size] of this rank's experts, max_tokens rows of each rank's tokens; out [tokens,
// hidden_size] of this rank's tokens.
void combine(const Tensor& partial, const Tensor& out, const Tensor& buffers, int64_t rank, double limit, int64_t few) {
  const Ranks ranks = ranks_of(kOp, buffers, rank, limit);
  for (const Tensor* t : {&partial, &out}) {
    MOEQ_CHECK(kOp, t->is_cuda() && t->dim() == 2 && t->is_contiguous() && aligned16(*t), t == &out ? "out" : "partial",
               " must be a contiguous CUDA matrix at a multiple of 16 bytes");
  }
  const int64_t hidden = partial.size(1), of_rank = partial.size(0) / ranks.size;
  MOEQ_CHECK(kOp, hidden % 8 == 0, "partial.shape[1] must be a multiple of 8, got ", hidden);
  MOEQ_CHECK(kOp, of_rank >= 1 && of_rank * ranks.size == partial.size(0), "partial.shape[0] must be a multiple of ",
             ranks.size, ", got ", partial.size(0));
  MOEQ_CHECK(kOp, out.size(1) == hidden && out.size(0) <= of_rank, "out must be [at most ", of_rank, ", ", hidden,
             "], got [", out.size(0), ", ", out.size(1), "]");
  const int64_t vectors = of_rank * hidden * static_cast<int64_t>(partial.element_size()) / 16;
  const CombineArgs args{static_cast<const uint4*>(partial.const_data_ptr()),
                         out.mutable_data_ptr(),
                         out.numel(),
                         out_type_of(kOp, out),
                         ranks,
                         Share(vectors, kPartsVectors)};
  const torch::stable::accelerator::DeviceGuard guard(partial.get_device_index());
  const cudaStream_t stream = current_stream(partial);
  with_element(kOp, partial, [&](auto element) { launch_for<decltype(element)>(args, few, stream); });
}

}  // namespace
}  // namespace moeq::ep

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) { m.impl("ep_p2p_combine", TORCH_BOX(&moeq::ep::combine)); }
