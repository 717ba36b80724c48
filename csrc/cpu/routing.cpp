#include "routing.h"

namespace moeq::cpu {

const Routing& group_by_expert(const ExpertsArgs& args, int64_t first_token, int64_t num_tokens, Routing& routing) {
  const int64_t slots = num_tokens * args.top_k;
  const int32_t* ids = args.topk_ids + first_token * args.top_k;
  auto local = [&](int64_t slot) { return static_cast<int64_t>(ids[slot]) - args.expert_offset; };
  auto is_local = [&](int64_t expert) { return expert >= 0 && expert < args.num_experts; };

  std::vector<int64_t>& next = routing.next;
  next.assign(static_cast<size_t>(args.num_experts) + 1, 0);
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (is_local(local(slot))) ++next[static_cast<size_t>(local(slot)) + 1];
  }
  routing.segments.clear();
  for (int64_t expert = 0; expert < args.num_experts; ++expert) {
    const int64_t begin = next[static_cast<size_t>(expert)];
    const int64_t end = next[static_cast<size_t>(expert) + 1] += begin;
    if (end > begin) routing.segments.push_back({expert, begin, end});
  }
  routing.tokens.resize(static_cast<size_t>(next.back()));
  routing.positions.assign(static_cast<size_t>(slots), -1);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t expert = local(slot);
    if (!is_local(expert)) continue;
    const int64_t position = next[static_cast<size_t>(expert)]++;
    routing.tokens[static_cast<size_t>(position)] = static_cast<int32_t>(slot / args.top_k);
    routing.positions[static_cast<size_t>(slot)] = static_cast<int32_t>(position);
  }
  return routing;
}

}  // namespace moeq::cpu
