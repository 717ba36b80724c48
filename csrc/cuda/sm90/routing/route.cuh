// Router logits to expert ids and weights, a token by one warp, in registers alone. The rules, and those on NaN,
// infinity and ties, are torch_moe_ops/routing/reference.py's; compiled without contraction (--fmad=false), scores have
// its bits.
//
// Lane l holds the logits of experts l, l + 32, l + 64, ... The top-k is top_k rounds of "largest key, lowest index
// that has it": two reductions each, which a warp does in one instruction. Sorting would work on all experts for the
// sake of a few.
#pragma once
#include <climits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "route.h"

namespace moeq::sm90 {

constexpr int kKeyOfTaken = INT_MIN;  // of what cannot be chosen (any more)
constexpr int kKeyOfNan = INT_MIN + 1;  // below every number
constexpr unsigned kAllLanes = 0xffffffffu;

// Integers in the order of the floats, -0 equal to 0, NaN below all.
__device__ __forceinline__ int ordered_key(float x) {
  const int bits = x == 0.0f ? 0 : __float_as_int(x);
  // Negative floats order backwards: flip all bits but the sign.
  return x != x ? kKeyOfNan : bits < 0 ? bits ^ 0x7fffffff : bits;
}

__device__ __forceinline__ float of_ordered_key(int key) { return __int_as_float(key < 0 ? key ^ 0x7fffffff : key); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

// Logits first, first + 32, ... of a row that starts at `row`, 0 beyond `experts`. One branch, then all loads together.
template <int each>
__device__ __forceinline__ void load_logits(const Router& r, int64_t row, int first, int experts, float (&z)[each]) {
  const auto load = [&](auto* logits, auto to_float) {
#pragma unroll
    for (int i = 0; i < each; ++i) z[i] = first + 32 * i < experts ? to_float(logits[row + first + 32 * i]) : 0.0f;
  };
  if (r.type == LogitType::kBfloat16) {
    load(static_cast<const __nv_bfloat16*>(r.logits), [](__nv_bfloat16 x) { return __bfloat162float(x); });
  } else if (r.type == LogitType::kFloat16) {
    load(static_cast<const __half*>(r.logits), [](__half x) { return __half2float(x); });
  } else {
    load(static_cast<const float*>(r.logits), [](float x) { return x; });
  }
}

// What a softmax needs besides the logit: the largest one and the sum of all masses.
struct Softmax {
  float top, total;
};

__device__ __forceinline__ float softmax_mass(float z, float top) {
  return z == top ? 1.0f : expf(z - top);  // inf - inf would be NaN
}

// Over the warp's values where `counts`; NaN counts for nothing, equal infinities share.
template <int each>
__device__ __forceinline__ Softmax softmax_of(const float (&z)[each], const bool (&counts)[each]) {
  int top = ordered_key(-CUDART_INF_F);
#pragma unroll
  for (int i = 0; i < each; ++i) top = counts[i] && z[i] == z[i] ? max(top, ordered_key(z[i])) : top;
  Softmax softmax = {of_ordered_key(__reduce_max_sync(kAllLanes, top)), 0.0f};
#pragma unroll
  for (int i = 0; i < each; ++i) {
    softmax.total += counts[i] && z[i] == z[i] ? softmax_mass(z[i], softmax.top) : 0.0f;
  }
  softmax.total = warp_sum(softmax.total);
  return softmax;
}

__device__ __forceinline__ float sqrt_softplus(float z) {
  // log(1 + e^z) without overflow. fmaxf would drop a NaN.
  return sqrtf((z > 0.0f || z != z ? z : 0.0f) + log1pf(expf(-fabsf(z))));
}

// Turns logits into scores; one branch, so that a lane's scores are worked out together.
template <int each>
__device__ __forceinline__ void make_scores(Score score, Softmax softmax, float (&z)[each]) {
  const auto replace = [&](auto f) {
#pragma unroll
    for (int i = 0; i < each; ++i) z[i] = f(z[i]);
  };
  if (score == Score::kSoftmax) {
    replace([&](float x) { return softmax_mass(x, softmax.top) / softmax.total; });
  } else if (score == Score::kSigmoid) {
    replace([](float x) { return 1.0f / (1.0f + expf(-x)); });
  } else if (score == Score::kSqrtsoftplus) {
    replace(sqrt_softplus);
  }
}

// Lane g's key of group g, where groups have 32 experts: the g-th of each lane.
template <int each>
__device__ __forceinline__ int key_of_register_group(const Router& r, const int (&keys)[each]) {
  const int lane = threadIdx.x % 32, lowest = ordered_key(-CUDART_INF_F);
  int mine = kKeyOfTaken;
#pragma unroll
  for (int group = 0; group < each; ++group) {
    const int key = max(keys[group], lowest);  // a NaN counts as the lowest
    const int best = __reduce_max_sync(kAllLanes, key);
    float score = of_ordered_key(best);
    if (r.bias != nullptr) {
      const int taken = __ffs(__ballot_sync(kAllLanes, key == best)) - 1;
      score += of_ordered_key(__reduce_max_sync(kAllLanes, lane == taken ? lowest : key));
    }
    mine = lane == group && group < r.groups ? ordered_key(score) : mine;
  }
  return mine;
}

// Takes the experts of all but the best groups out of `keys`: best by their largest choice, or by the sum of their two
// largest where there is a bias. Groups are at most kRouteGroups; equal ones go by their number.
template <int each>
__device__ __forceinline__ void keep_best_groups(const Router& r, int (&keys)[each]) {
  const int lane = threadIdx.x % 32, size = r.experts / r.groups;
  int group_of[each];
#pragma unroll
  for (int i = 0; i < each; ++i) group_of[i] = (32 * i + lane) / size;
  int key_of_group = size == 32 ? key_of_register_group(r, keys) : kKeyOfTaken;  // of group `lane`
  for (int group = 0; size != 32 && group < r.groups; ++group) {
    const int lowest = ordered_key(-CUDART_INF_F);
    int first = lowest, at = INT_MAX;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const bool better = group_of[i] == group && keys[i] > first;
      first = better ? keys[i] : first;
      at = better ? 32 * i + lane : at;
    }
    const int best = __reduce_max_sync(kAllLanes, first);
    float score = of_ordered_key(best);
    if (r.bias != nullptr) {
      const int taken = __reduce_min_sync(kAllLanes, first == best ? at : INT_MAX);
      int second = lowest;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        second = group_of[i] == group && 32 * i + lane != taken ? max(second, keys[i]) : second;
      }
      score += of_ordered_key(__reduce_max_sync(kAllLanes, second));
    }
    key_of_group = group == lane ? ordered_key(score) : key_of_group;
  }
  uint32_t kept = 0;
  for (int i = 0; i < r.topk_group; ++i) {
    const int best = __reduce_max_sync(kAllLanes, key_of_group);
    const int group = __ffs(__ballot_sync(kAllLanes, key_of_group == best)) - 1;
    kept |= 1u << group;
    key_of_group = lane == group ? kKeyOfTaken : key_of_group;
  }
#pragma unroll
  for (int i = 0; i < each; ++i) {
    keys[i] = kept >> min(group_of[i], 31) & 1 ? keys[i] : kKeyOfTaken;
  }
}

// Lane j < top_k gets the expert that comes j-th; the others 0.
template <int each>
__device__ __forceinline__ int take_best(int top_k, int (&keys)[each]) {
  const int lane = threadIdx.x % 32;
  int mine = 0;
  for (int j = 0; j < top_k; ++j) {
    int best = keys[0], at = lane;
#pragma unroll
    for (int i = 1; i < each; ++i) {
      at = keys[i] > best ? 32 * i + lane : at;
      best = max(best, keys[i]);
    }
    const int top = __reduce_max_sync(kAllLanes, best);
    const int expert = __reduce_min_sync(kAllLanes, best == top ? at : INT_MAX);
    mine = lane == j ? expert : mine;
#pragma unroll
    for (int i = 0; i < each; ++i) keys[i] = 32 * i + lane == expert ? kKeyOfTaken : keys[i];
  }
  return mine;
}

// A bfloat16 logit and its place in one integer: larger logits are larger, equal ones the larger the lower their index.
// NaN is below every number, and 0x8000 in the upper half is what cannot be chosen.
__device__ __forceinline__ int packed_key(float z, int index, bool valid) {
  const uint32_t key = !valid   ? 0x80000000u
                       : z != z ? 0x80010000u
                                : static_cast<uint32_t>(ordered_key(z)) & 0xffff0000u;
  return static_cast<int>(key | (0xffffu - index));
}

__device__ __forceinline__ int index_of_packed(int key) { return 0xffff - (key & 0xffff); }

__device__ __forceinline__ float of_packed_key(int key) {
  return of_ordered_key(key < 0 ? key | 0xffff : key & ~0xffff);
}

// Largest first. A lane's own, by merging ever longer sorted parts (Batcher's exchanges).
template <int each>
__device__ __forceinline__ void sort_keys(int (&keys)[each]) {
#pragma unroll
  for (int part = 1; part < each; part *= 2) {
#pragma unroll
    for (int apart = part; apart > 0; apart /= 2) {
#pragma unroll
      for (int first = apart % part; first + apart < each; first += 2 * apart) {
#pragma unroll
        for (int i = first; i < first + apart && i + apart < each; ++i) {
          if (i / (2 * part) == (i + apart) / (2 * part)) {
            const int larger = max(keys[i], keys[i + apart]);
            keys[i + apart] = min(keys[i], keys[i + apart]);
            keys[i] = larger;
          }
        }
      }
    }
  }
}

// Lane j < count gets the key that comes j-th. All keys differ, so that a round is one reduction: the lane that has the
// largest goes on to its next one.
template <int each>
__device__ __forceinline__ int take_best_packed(int count, int (&keys)[each]) {
  const int lane = threadIdx.x % 32;
  int mine = 0;
  sort_keys(keys);
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    const int top = __reduce_max_sync(kAllLanes, keys[0]);
    mine = lane == j ? top : mine;
    const bool taken = keys[0] == top;
#pragma unroll
    for (int i = 0; i + 1 < each; ++i) keys[i] = taken ? keys[i + 1] : keys[i];
    keys[each - 1] = taken ? INT_MIN : keys[each - 1];
  }
  return mine;
}

// Lane j's final weight, from its chosen logit. `softmax` is that of all experts where they were chosen by one.
__device__ __forceinline__ float weight_of(const Router& r, float z, Softmax softmax) {
  const bool counts = threadIdx.x % 32 < r.top_k;
  if (r.weight == Score::kSoftmax && r.score != Score::kSoftmax) softmax = softmax_of<1>({z}, {counts});
  float score[1] = {z};
  make_scores(r.weight, softmax, score);
  float weight = score[0];
  weight = counts && weight == weight ? weight : 0.0f;
  if (r.renormalize) {
    const bool infinite = weight == CUDART_INF_F;
    if (__any_sync(kAllLanes, infinite)) weight = infinite ? 1.0f : 0.0f;
    weight = weight / (warp_sum(weight) + 1e-20f);
  }
  return weight * r.factor;
}

// A lane's value of `z` that belongs to its `expert`.
template <int each>
__device__ __forceinline__ float value_of_expert(const float (&z)[each], int expert) {
  float value = 0.0f;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const float other = __shfl_sync(kAllLanes, z[i], expert % 32);
    value = expert / 32 == i ? other : value;
  }
  return value;
}

// Softmax keeps the order of logits, so that experts can be chosen without it; but different logits may round to the
// same score, and equal scores go by their number. -1 on all lanes where that cannot be excluded: where neighbours in
// the order, the first expert that is not chosen among them, are close together or far below the largest.
template <bool kPacks, int each>
__device__ __forceinline__ int choose_by_logits(const Router& r, const float (&z)[each], const bool (&valid)[each]) {
  constexpr float kApart = 1e-4f, kBelow = 60.0f;
  const int lane = threadIdx.x % 32, last = min(r.top_k, r.experts - 1);
  int keys[each], expert;
  float mine;
  if (kPacks && r.type == LogitType::kBfloat16) {
#pragma unroll
    for (int i = 0; i < each; ++i) keys[i] = packed_key(z[i], 32 * i + lane, valid[i]);
    const int key = take_best_packed(last + 1, keys);
    expert = lane <= last ? index_of_packed(key) : 0;
    mine = of_packed_key(key);
  } else {
#pragma unroll
    for (int i = 0; i < each; ++i) keys[i] = valid[i] ? ordered_key(z[i]) : kKeyOfTaken;
    expert = take_best(last + 1, keys);
    mine = value_of_expert(z, expert);
  }
  const float top = __shfl_sync(kAllLanes, mine, 0);
  const float next = __shfl_down_sync(kAllLanes, mine, 1);
  const bool clear = (mine == next || mine - next > kApart) && next - top > -kBelow;
  return __all_sync(kAllLanes, clear || lane >= last) ? expert : -1;
}

// The same by scores, and biases, and groups.
template <int each>
__device__ __forceinline__ int choose_by_scores(const Router& r, const float (&logits)[each], const bool (&valid)[each],
                                                Softmax softmax) {
  const int lane = threadIdx.x % 32;
  float z[each];
  int keys[each];
#pragma unroll
  for (int i = 0; i < each; ++i) z[i] = logits[i];
  make_scores(r.score, softmax, z);
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const float bias = valid[i] && r.bias != nullptr ? r.bias[32 * i + lane] : 0.0f;
    keys[i] = valid[i] ? ordered_key(z[i] + bias) : kKeyOfTaken;
  }
  if (r.topk_group < r.groups) keep_best_groups(r, keys);
  return take_best(r.top_k, keys);
}

// From logits 32 * i + lane of a token, rounded to r.type; lane j < top_k has the expert that comes j-th.
template <bool kPacks, int each>
__device__ __forceinline__ void route_loaded(const Router& r, const float (&z)[each], int32_t* ids, float* weights) {
  const int lane = threadIdx.x % 32;
  bool valid[each];
#pragma unroll
  for (int i = 0; i < each; ++i) valid[i] = 32 * i + lane < r.experts;
  const bool by_logits = r.score == Score::kSoftmax && r.bias == nullptr && r.topk_group >= r.groups && r.top_k < 32;
  Softmax softmax = {0.0f, 1.0f};
  int expert = by_logits ? choose_by_logits<kPacks>(r, z, valid) : -1;
  const bool late = expert >= 0;  // of all lanes
  if (!late) {
    if (r.score == Score::kSoftmax) softmax = softmax_of(z, valid);
    expert = choose_by_scores(r, z, valid, softmax);
  }
  if (lane < r.top_k) ids[lane] = expert;
  if (late) softmax = softmax_of(z, valid);
  const float chosen = value_of_expert(z, expert);  // all lanes come
  const float weight = weight_of(r, lane < r.top_k ? chosen : 0.0f, softmax);
  if (lane < r.top_k) weights[lane] = weight;
}

// The same of a token whose logits are loaded first; for up to 32 * each experts.
template <int each, bool kPacks>
__device__ __forceinline__ void route_by_warp(const Router& r, int64_t token, int32_t* ids, float* weights) {
  float z[each];
  load_logits(r, token * r.row_stride, threadIdx.x % 32, r.experts, z);
  route_loaded<kPacks>(r, z, ids, weights);
}

}  // namespace moeq::sm90
