// Slots (token, j) of a chunk of tokens, grouped by the local expert that they visit.
#pragma once

#include <vector>

#include "args.h"

namespace moeq::cpu {

struct Segment {
  int64_t expert;
  int64_t begin;  // into Routing::tokens
  int64_t end;
};

struct Routing {
  std::vector<Segment> segments;   // experts in ascending order, none empty
  std::vector<int32_t> tokens;     // chunk-local token of every routed slot, ascending within a segment
  std::vector<int32_t> positions;  // [tokens, top_k] -> index into `tokens`, -1 where the expert is foreign
  std::vector<int64_t> next;       // [experts + 1], of use while the others are made
};

// Into `routing`, whose memory is used again. Returns it.
const Routing& group_by_expert(const ExpertsArgs& args, int64_t first_token, int64_t num_tokens, Routing& routing);

}  // namespace moeq::cpu
