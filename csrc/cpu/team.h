// Whether a call is worth a team of threads at this moment.
//
// A thread pool waits for every thread of a team. Where another process has one's core, that takes until the scheduler
// gives it back, milliseconds, and helpers (helpers.h) would have been done long before. Results do not depend on who
// computes them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace moeq::cpu {

inline int64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// After a call that took far longer than the caller itself computed, calls of that size do without the pool for a
// while: one at first, twice as many each time that a team is late again. So a busy machine is asked seldom, and a
// quiet one that hiccuped is back at once. Several threads may ask; what they overwrite of each other's is an opinion.
class TeamJudge {
 public:
  // work: any measure of the size of a call that grows with it.
  bool does_without(int64_t work) {
    if (left_out_.load(std::memory_order_relaxed) <= 0) return false;
    if (work > late_work_.load(std::memory_order_relaxed)) return false;
    left_out_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }

  // A team took `elapsed` ns, in which the caller itself computed for `busy`.
  void saw(int64_t work, int64_t elapsed, int64_t busy) {
    const int64_t penalty = penalty_.load(std::memory_order_relaxed);
    if (elapsed <= 2 * busy + kWakeUp) {
      penalty_.store(penalty / 2, std::memory_order_relaxed);
      return;
    }
    const int64_t longer = std::clamp<int64_t>(2 * penalty, kFirstPenalty, kLargestPenalty);
    penalty_.store(longer, std::memory_order_relaxed);
    late_work_.store(work, std::memory_order_relaxed);
    left_out_.store(longer, std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t kFirstPenalty = 1;  // calls
  static constexpr int64_t kLargestPenalty = 64;
  static constexpr int64_t kWakeUp = 100000;  // ns that a team of sleeping threads may take to begin

  std::atomic<int64_t> penalty_{0};
  std::atomic<int64_t> left_out_{0};
  std::atomic<int64_t> late_work_{0};
};

}  // namespace moeq::cpu
