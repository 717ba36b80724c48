// Router logits to expert ids and weights, a token by one warp. The rules, and those on NaN, infinity and ties, are
// torch_moe_ops/routing/reference.py's; compiled without contraction (--fmad=false), scores have its bits.
// Lane l holds the logits of experts l, l + 32, l + 64, ... The top-k is top_k rounds of "largest key, lowest index
// that has it". A lane sorts its own experts first, where they are few: a round is one reduction.
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
constexpr int kMostSorted = 16;  // experts that a lane sorts

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

// 1 / (1 + e^-z), correctly rounded: as a division without its branch, for which a lane's values would wait for each
// other. Exact but where the result is subnormal, or 0 (test_cuda_sm90_routing.py).
template <int each>
__device__ __forceinline__ void make_sigmoids(float (&z)[each]) {
  constexpr float kLargest = 0x1p126f;
  bool all_normal = true;
  float y[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    y[i] = 1.0f + expf(-z[i]);
    all_normal = all_normal && y[i] < kLargest;  // not of a NaN
  }
  if (__all_sync(kAllLanes, all_normal)) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      float x;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(y[i]));
      z[i] = __fmaf_rn(x, __fmaf_rn(-y[i], x, 1.0f), x);
    }
  } else {
#pragma unroll
    for (int i = 0; i < each; ++i) z[i] = 1.0f / y[i];
  }
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
    make_sigmoids(z);
  } else if (score == Score::kSqrtsoftplus) {
    replace(sqrt_softplus);
  }
}

// The two largest keys of a group.
struct BestTwo {
  int first, second;
};

__device__ __forceinline__ BestTwo merged(BestTwo a, BestTwo b) {
  return {max(a.first, b.first), max(min(a.first, b.first), max(a.second, b.second))};
}

__device__ __forceinline__ BestTwo other_lanes(BestTwo x, int apart) {
  return {__shfl_xor_sync(kAllLanes, x.first, apart), __shfl_xor_sync(kAllLanes, x.second, apart)};
}

// Over all lanes, of each register's group: two lanes keep a half of what they have each, until lane l has those of
// group l / (32 / each).
template <int apart, int left, int each>
__device__ __forceinline__ void reduce_groups(BestTwo (&best)[each]) {
  constexpr int kKept = left > 1 ? left / 2 : 1;
  const bool upper = threadIdx.x % 32 & apart;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    BestTwo kept = best[i], given = best[i];
    if constexpr (left > 1) {
      kept = upper ? best[kKept + i] : best[i];
      given = upper ? best[i] : best[kKept + i];
    }
    best[i] = merged(kept, other_lanes(given, apart));
  }
  if constexpr (apart > 1) reduce_groups<apart / 2, kKept>(best);
}

// A group is chosen by its largest key, or by the sum of its two largest where there is a bias. NaN is the lowest.
__device__ __forceinline__ int key_of_group(const Router& r, BestTwo best) {
  const float first = of_ordered_key(best.first);
  return ordered_key(r.bias == nullptr ? first : first + of_ordered_key(best.second));
}

// Groups of 32 experts, the i-th of every lane each: key of group lane / (32 / each).
template <int each>
__device__ __forceinline__ int key_of_register_group(const Router& r, const int (&keys)[each]) {
  constexpr int kLanes = 32 / each;
  const int lowest = ordered_key(-CUDART_INF_F);
  BestTwo best[each];
#pragma unroll
  for (int i = 0; i < each; ++i) best[i] = {max(keys[i], lowest), lowest};
  reduce_groups<16, each>(best);
  return static_cast<int>(threadIdx.x % 32) / kLanes < r.groups ? key_of_group(r, best[0]) : kKeyOfTaken;
}

// Groups of any other size: key of group `lane`.
template <int each>
__device__ __forceinline__ int key_of_any_group(const Router& r, const int (&keys)[each], const int (&group_of)[each]) {
  const int lane = threadIdx.x % 32, lowest = ordered_key(-CUDART_INF_F);
  int mine = kKeyOfTaken;
  for (int group = 0; group < r.groups; ++group) {
    BestTwo best = {lowest, lowest};
#pragma unroll
    for (int i = 0; i < each; ++i) best = merged(best, {group_of[i] == group ? max(keys[i], lowest) : lowest, lowest});
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) best = merged(best, other_lanes(best, apart));
    mine = group == lane ? key_of_group(r, best) : mine;
  }
  return mine;
}

// Bits of lanes whose group is among the best; every lanes_of_group-th lane has another's `key`. Equal: by number.
__device__ __forceinline__ uint32_t best_groups(const Router& r, int key, int lanes_of_group) {
  const int mine = static_cast<int>(threadIdx.x % 32) / lanes_of_group;
  int better = 0;
#pragma unroll 4
  for (int group = 0; group < r.groups; ++group) {
    const int other = __shfl_sync(kAllLanes, key, group * lanes_of_group);
    better += other > key || (other == key && group < mine);
  }
  return __ballot_sync(kAllLanes, better < r.topk_group);
}

// Takes the experts of all but the best groups out of `keys`. Groups are at most kRouteGroups.
template <int each>
__device__ __forceinline__ void keep_best_groups(const Router& r, int (&keys)[each]) {
  const int lane = threadIdx.x % 32, size = r.experts / r.groups;
  if constexpr (each <= 32) {
    if (size == 32) {
      constexpr int kLanes = 32 / each;
      const uint32_t kept = best_groups(r, key_of_register_group(r, keys), kLanes);
#pragma unroll
      for (int i = 0; i < each; ++i) keys[i] = kept >> (i * kLanes) & 1 ? keys[i] : kKeyOfTaken;
      return;
    }
  }
  int group_of[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    // Exact: the quotient of what is half between integers is not within a rounding of one.
    group_of[i] = __float2int_rz((static_cast<float>(32 * i + lane) + 0.5f) * (1.0f / static_cast<float>(size)));
  }
  const uint32_t kept = best_groups(r, key_of_any_group(r, keys, group_of), 1);
#pragma unroll
  for (int i = 0; i < each; ++i) keys[i] = kept >> min(group_of[i], 31) & 1 ? keys[i] : kKeyOfTaken;
}

// Largest first: by merging ever longer sorted parts (Batcher's exchanges). `exchange(i, j)`, i < j, puts the larger
// one of two first. A step of template arguments for each distance, as nested loops of this length are not unrolled.
template <int each, int part, int apart, class Exchange>
__device__ __forceinline__ void sort_network(Exchange exchange) {
  constexpr int kFirst = apart % part;
#pragma unroll
  for (int i = kFirst; i + apart < each; ++i) {
    if ((i - kFirst) / apart % 2 == 0 && i / (2 * part) == (i + apart) / (2 * part)) exchange(i, i + apart);
  }
  if constexpr (apart > 1) {
    sort_network<each, part, apart / 2>(exchange);
  } else if constexpr (2 * part < each) {
    sort_network<each, 2 * part, 2 * part>(exchange);
  }
}

// The first one goes where `taken`.
template <int each>
__device__ __forceinline__ void move_on(int (&values)[each], bool taken, int last) {
#pragma unroll
  for (int i = 0; i + 1 < each; ++i) values[i] = taken ? values[i + 1] : values[i];
  values[each - 1] = taken ? last : values[each - 1];
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

// Lane j < top_k gets the key that comes j-th. All keys differ.
template <int each>
__device__ __forceinline__ int take_packed(int top_k, int (&keys)[each]) {
  if constexpr (each > 1) {
    sort_network<each, 1, 1>([&](int i, int j) {
      const int larger = max(keys[i], keys[j]);
      keys[j] = min(keys[i], keys[j]);
      keys[i] = larger;
    });
  }
  int mine = 0;
#pragma unroll 1
  for (int j = 0; j < top_k; ++j) {
    const int top = __reduce_max_sync(kAllLanes, keys[0]);
    mine = threadIdx.x % 32 == j ? top : mine;
    move_on(keys, keys[0] == top, INT_MIN);
  }
  return mine;
}

// Lane j < top_k gets the expert that comes j-th; the others 0. Of equal keys the lowest expert comes first.
template <int each>
__device__ __forceinline__ int take_one_by_one(int top_k, int (&keys)[each]) {
  const int lane = threadIdx.x % 32;
  int mine = 0;
#pragma unroll 1
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

// The same. Lanes sort their own where they are few; who has the largest says so to the lane that gets it, through
// `chosen`, and moves on. Lanes with equal keys would both: then all is done again, one by one.
template <int each>
__device__ __forceinline__ int take_best(int top_k, int (&keys)[each], int* chosen) {
  if constexpr (each <= kMostSorted) {
    const int lane = threadIdx.x % 32;
    int sorted[each], experts[each], taken_here = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      sorted[i] = keys[i];
      experts[i] = 32 * i + lane;
    }
    if constexpr (each > 1) {
      sort_network<each, 1, 1>([&](int i, int j) {
        const int key = sorted[i], other = sorted[j], expert = experts[i];
        const bool swaps = other > key || (other == key && experts[j] < expert);
        sorted[i] = max(key, other);
        sorted[j] = min(key, other);
        experts[i] = swaps ? experts[j] : expert;
        experts[j] = swaps ? expert : experts[j];
      });
    }
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < top_k; ++j) {
      const bool taken = sorted[0] == __reduce_max_sync(kAllLanes, sorted[0]);
      if (taken) chosen[j] = experts[0];
      taken_here += taken;
      move_on(sorted, taken, kKeyOfTaken);
      move_on(experts, taken, INT_MAX);
    }
    __syncwarp();
    if (__reduce_add_sync(kAllLanes, taken_here) == top_k) return lane < top_k ? chosen[lane] : 0;
  }
  return take_one_by_one(top_k, keys);
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

// A lane's value of `z` that belongs to its `expert`, one of 32 * each.
template <int each>
__device__ __forceinline__ float value_of_expert(const float (&z)[each], int expert) {
  float value = 0.0f;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const float other = __shfl_sync(kAllLanes, z[i], expert & 31);
    value = expert >> 5 == i ? other : value;
  }
  return value;
}

// An expert that comes at a lane's place, and its logit.
struct Chosen {
  int expert;
  float z;
};

// By the logits themselves; `more`: how many, top_k or one more.
template <int each>
__device__ __forceinline__ Chosen best_logits(const Router& r, const float (&z)[each], const bool (&valid)[each],
                                              int more, int* chosen) {
  const int lane = threadIdx.x % 32;
  int keys[each];
  if constexpr (each <= kMostSorted) {
    if (r.type == LogitType::kBfloat16) {
#pragma unroll
      for (int i = 0; i < each; ++i) keys[i] = packed_key(z[i], 32 * i + lane, valid[i]);
      const int key = take_packed(more, keys), expert = lane < more ? index_of_packed(key) : 0;
      // A key of -0 is that of 0, which a weight tells from it where it is the logit itself.
      return {expert, r.weight == Score::kIdentity ? value_of_expert(z, expert) : of_packed_key(key)};
    }
  }
#pragma unroll
  for (int i = 0; i < each; ++i) keys[i] = valid[i] ? ordered_key(z[i]) : kKeyOfTaken;
  const int expert = take_best(more, keys, chosen);
  return {expert, value_of_expert(z, expert)};
}

// Softmax keeps the order of logits, so that experts can be chosen without it; but different logits may round to the
// same score, and equal scores go by their number. False where that cannot be excluded: where neighbours in the order,
// the first expert left out among them, are close together or far below the largest. Equal ones are in their order, but
// where the first left out equals the last chosen, close ones below have to be looked for, whose numbers may be lower.
template <int each>
__device__ __forceinline__ bool are_apart(const float (&z)[each], const bool (&valid)[each], float mine, int last) {
  constexpr float kApart = 1e-4f, kBelow = 60.0f;
  const int lane = threadIdx.x % 32;
  const float top = __shfl_sync(kAllLanes, mine, 0);
  const float next = __shfl_down_sync(kAllLanes, mine, 1);
  const bool clear = (mine == next || mine - next > kApart) && next - top > -kBelow;
  if (!__all_sync(kAllLanes, clear || lane >= last)) return false;
  if (!__any_sync(kAllLanes, lane + 1 == last && mine == next)) return true;
  const float first_left_out = __shfl_sync(kAllLanes, mine, last);
  bool close = false;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    close = close || (valid[i] && z[i] < first_left_out && first_left_out - z[i] <= kApart);
  }
  return !__any_sync(kAllLanes, close);
}

// By scores, and biases, and groups.
template <int each>
__device__ __forceinline__ Chosen best_scores(const Router& r, const float (&logits)[each], const float (&bias)[each],
                                              const bool (&valid)[each], Softmax softmax, int* chosen) {
  float z[each];
  int keys[each];
#pragma unroll
  for (int i = 0; i < each; ++i) z[i] = logits[i];
  make_scores(r.score, softmax, z);
#pragma unroll
  for (int i = 0; i < each; ++i) keys[i] = valid[i] ? ordered_key(z[i] + bias[i]) : kKeyOfTaken;
  if (r.topk_group < r.groups) keep_best_groups(r, keys);
  const int expert = take_best(r.top_k, keys, chosen);
  return {expert, value_of_expert(logits, expert)};
}

// Of experts 32 * i + lane, 0 where there is none. Asked for with the logits, not to be waited for alone.
template <int each>
__device__ __forceinline__ void load_bias(const Router& r, float (&bias)[each]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    bias[i] = r.bias != nullptr && 32 * i + lane < r.experts ? r.bias[32 * i + lane] : 0.0f;
  }
}

// From logits 32 * i + lane of a token, rounded to r.type, and biases; lane j < top_k has the expert that comes j-th.
// `chosen`: 32 numbers in shared memory, the warp's own.
template <int each>
__device__ __forceinline__ void route_loaded(const Router& r, const float (&z)[each], const float (&bias)[each],
                                             int* chosen, int32_t* ids, float* weights) {
  const int lane = threadIdx.x % 32;
  bool valid[each];
#pragma unroll
  for (int i = 0; i < each; ++i) valid[i] = 32 * i + lane < r.experts;
  const bool all_alike = r.bias == nullptr && r.topk_group >= r.groups;
  const bool by_softmax = r.score == Score::kSoftmax;
  Chosen found;
  Softmax softmax = {0.0f, 1.0f};
  bool is_known = false;  // on all lanes
  if (all_alike && (r.score == Score::kIdentity || (by_softmax && r.top_k < 32))) {
    const int last = min(r.top_k, r.experts - 1);
    found = best_logits(r, z, valid, by_softmax ? last + 1 : r.top_k, chosen);
    is_known = !by_softmax || are_apart(z, valid, found.z, last);
  }
  if (by_softmax) softmax = softmax_of(z, valid);
  if (!is_known) found = best_scores(r, z, bias, valid, softmax, chosen);
  if (lane < r.top_k) ids[lane] = found.expert;
  const float weight = weight_of(r, lane < r.top_k ? found.z : 0.0f, softmax);
  if (lane < r.top_k) weights[lane] = weight;
}

__device__ __forceinline__ float load_as_float(const void* values, LogitType type, int64_t at) {
  switch (type) {
    case LogitType::kBfloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[at]);
    case LogitType::kFloat16:
      return __half2float(static_cast<const __half*>(values)[at]);
    default:
      return static_cast<const float*>(values)[at];
  }
}

// The columns behind the router's, of a token whose row begins at `ids` and `weights`.
__device__ __forceinline__ void append_shared(const Router& r, const SharedExperts& shared, int64_t token, int32_t* ids,
                                              float* weights) {
  const int lane = threadIdx.x % 32;
  if (lane >= shared.count) return;
  ids[r.top_k + lane] = r.experts + lane;
  weights[r.top_k + lane] =
      shared.weights == nullptr ? 1.0f : load_as_float(shared.weights, shared.type, token * shared.count + lane);
}

// A token whose logits and biases are loaded first; for up to 32 * each experts.
template <int each>
__device__ __forceinline__ void route_by_warp(const Router& r, int64_t token, int* chosen, int32_t* ids,
                                              float* weights) {
  float z[each], bias[each];
  load_logits(r, token * r.row_stride, threadIdx.x % 32, r.experts, z);
  load_bias(r, bias);
  route_loaded(r, z, bias, chosen, ids, weights);
}

}  // namespace moeq::sm90
