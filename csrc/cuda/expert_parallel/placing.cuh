// From experts as a router names them to the places where they lie, while their ids are given to the other ranks
// (torch_moe_ops/transports/placing.py says it in torch).
#pragma once
#include <cstdint>

namespace moeq::ep {

struct Placing {
  const int32_t* first;  // [experts]; null: ids are places
  const int32_t* count;  // [experts]
  const int32_t* slots;  // [places]
  unsigned long long* load;  // [experts]
  int experts, places, rank;
};

// Of token `token` of this rank. Counts it.
__device__ __forceinline__ int32_t place_of(const Placing& placing, int32_t id, int64_t token) {
  if (placing.first == nullptr) {
    return id;
  }
  if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(placing.experts)) {
    return -1;
  }
  atomicAdd(placing.load + id, 1ull);
  const int32_t count = placing.count[id];
  const int32_t turn = static_cast<int32_t>((placing.rank + token) % (count < 1 ? 1 : count));
  const int32_t at = placing.first[id] + turn;  // whatever the tables hold, no memory of others is read
  return placing.slots[at < 0 ? 0 : at < placing.places ? at : placing.places - 1];
}

}  // namespace moeq::ep
