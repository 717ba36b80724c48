// The persistent kernel of one GEMM, and what a launch has to know of it.
#pragma once
#include <type_traits>

#include "w4a8_epilogue.cuh"
#include "w4a8_mainloop.cuh"
#include "w4a8_shared.cuh"
#include "w4a8_tokens_first.cuh"
#include "../device/async.cuh"
#include "../prefill/prefill_plan.h"

namespace moeq::sm90::w4a8 {

// The persistent kernel of one GEMM. Two warpgroups multiply, or three, a warp of another one loads.
template <class Policy, Finish finish, class P>
__device__ __forceinline__ void make_tile(const GemmArgs& args, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                          const Work& work, int warpgroup, const Ring<kWorkSlots>& works) {
  const Span<P> span(work.width);
  Sums<P> sums = {};
  const Steps steps{kept(args.k_tiles), kept(threadIdx.x % 128)};
  if constexpr (kKnowsWidths<Policy>) {
    multiply_width<0>(sums, shared, ring, warpgroup, span, steps);
  } else if constexpr (Policy::kTileScales > 0) {
    multiply_decoded(sums, shared, ring, warpgroup, span, steps);
  } else {
    multiply_bytes<finish == Finish::kOutput>(sums, shared, ring, warpgroup, span, steps, args, work);
  }
  store<Policy, finish, P>(args, shared, work, sums, span.tokens, warpgroup, works.slot, works.parity);
}

template <class Policy, Finish finish>
__device__ __forceinline__ void consume(const GemmArgs& args, GemmShared<Policy>& shared) {
  // From one lane, so that the compiler knows it to be uniform: operand descriptors are made of it.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  Ring<kWorkSlots> work_ring;
  Ring<Policy::kStages> ring;
  while (true) {
    barrier_wait(shared_address(&shared.work_full[work_ring.slot]), work_ring.parity);
    const Work work = shared.work[work_ring.slot];
    if (work.expert < 0) break;
    constexpr bool paired = Policy::kWidth == kMaxPaired;
    using Narrowest = std::conditional_t<Policy::kWidth == kMaxNarrow || paired, Short, Whole>;
    using Widest = std::conditional_t<paired, Shorts, Halves>;
    if constexpr (std::is_same_v<Policy, TokensFirst>) {
      make_tile<finish>(args, shared, ring, work, warpgroup, work_ring);
    } else if (paired ? work.width <= kMaxNarrow : Policy::kWidth <= kMaxSingle || work.width <= kMaxSingle) {
      make_tile<Policy, finish, Narrowest>(args, shared, ring, work, warpgroup, work_ring);
    } else {
      make_tile<Policy, finish, Widest>(args, shared, ring, work, warpgroup, work_ring);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.work_empty[work_ring.slot]));
    work_ring.advance();
  }
}

template <class Policy, Finish finish>
__global__ void __launch_bounds__(kGemmThreads<Policy>, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint8_t dynamic_shared[];
  GemmShared<Policy>& shared =
      *reinterpret_cast<GemmShared<Policy>*>(dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();
  constexpr bool three = Policy::kBlockTiles == 3;
  if (threadIdx.x >= kConsumerThreads<Policy>) {
    registers_shrink<three ? 56 : 40>();
    const int warp = (threadIdx.x - kConsumerThreads<Policy>) / 32;
    if (warp == 0) produce(args, shared);
    if (warp == 1) load_rows<Policy, finish>(args, shared);
  } else {
    registers_grow<three ? 152 : 232>();
    consume<Policy, finish>(args, shared);
  }
}

template <class Policy, Finish finish>
Variant<GemmArgs> variant_of() {
  return {gemm_kernel<Policy, finish>, sizeof(GemmShared<Policy>) + 1024,
          kGemmThreads<Policy>,        1,
          Policy::kBlockTiles,         Policy::kWidth};
}

template <class Policy>
Variant<GemmArgs> variant_of(Finish finish) {
  switch (finish) {
    case Finish::kSwiglu:
      if constexpr (!std::is_same_v<Policy, Blocks<kMaxWidth>>) return variant_of<Policy, Finish::kSwiglu>();
      return {};   // tokens are the first factor there
    case Finish::kLinear:
      return variant_of<Policy, Finish::kLinear>();
    default:
      return variant_of<Policy, Finish::kOutput>();
  }
}

template <template <int> class Policy>
Variant<GemmArgs> variant_of(Finish finish, bool wide) {
  return wide ? variant_of<Policy<kMaxWidth>>(finish) : variant_of<Policy<kMaxSingle>>(finish);
}

// The kernels of INT4 weights (w4a8_int4.cu). zeros: weights have zero points, or float16 scales. widest: of
// widest_of_int4.
Variant<GemmArgs> int4_variant(bool zeros, Finish finish, int widest);

}  // namespace moeq::sm90::w4a8
