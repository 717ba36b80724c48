// The warp that loads weights of 8 bits.
#pragma once
#include "gemm_byte_config.cuh"

namespace moeq::sm90 {

// By one thread. The last tile of rows stands in for those beyond.
template <int width>
__device__ __forceinline__ void load_weights(const GemmArgs& args, GemmShared<ByteConfig<width>>& shared) {
  using C = ByteConfig<width>;
  constexpr int kTiles = Sizes<C>::kBlockTiles;
  const Problem& p = args.problem;
  const int scale_bytes = p.format == Format::kMxfp8 ? kMxfp8ScaleBytes : 0;
  Ring<kWorkSlots> work_ring;
  Ring<C::kWeightStages> ring;
  while (true) {
    const Work work = take_work(shared, work_ring);
    if (work.expert < 0) return;
    const int row_tiles = work.second ? args.tiles2 : args.tiles13, steps = work.k_tiles / 2;
    const int first = work.row_block * kTiles, real = min(kTiles, row_tiles - first);
    const int64_t tile = (int64_t{work.expert} * row_tiles + first) * steps;
    const uint8_t* codes = (work.second ? p.w2 : p.w13) + tile * w4a8::kFp8Bytes;
    const uint8_t* scales = scale_bytes == 0 ? nullptr : (work.second ? p.w2_scale : p.w13_scale) + tile * scale_bytes;
    const int wanted = max(steps - kStagesAhead, 0);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      if (step == wanted) barrier_arrive(shared_address(&shared.work_wanted));
      barrier_wait(shared_address(&shared.weights_empty[ring.slot]), ring.parity ^ 1);
      const uint32_t full = shared_address(&shared.weights_full[ring.slot]);
      barrier_expect(full, kTiles * (w4a8::kFp8Bytes + scale_bytes));
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        const int64_t from = int64_t{min(i, real - 1)} * steps + step;
        copy_bulk(shared_address(shared.codes[ring.slot][i]), codes + from * w4a8::kFp8Bytes, w4a8::kFp8Bytes, full);
        if (scale_bytes != 0) {
          copy_bulk(shared_address(shared.scales[ring.slot][i]), scales + from * scale_bytes, scale_bytes, full);
        }
      }
      ring.advance();
    }
  }
}

}  // namespace moeq::sm90
