// Threads of the library's own, for calls that nobody may be late for.
//
// A thread pool's hand-over ends when all of its threads have come back. Here a call ends when its tasks are done: a
// helper that has no core at the moment took none, or at most one small task. Nobody spins for long, so that who waits
// has not used up its share of a core when it is needed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace moeq::cpu {

using TaskBody = void (*)(const void* context, int64_t task);

class Helpers {
 public:
  // Those of this process. They live as long as it does; a forked child gets its own.
  static Helpers& of_process();

  Helpers() = default;
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // Takes them for one call, with up to `count` threads beside the caller; false where another call has them.
  bool take(int count);
  void give_back();

  // By the thread that took them: runs body(context, task) for 0 <= task < tasks < 2^32 - 1, and returns when all are
  // done. No task throws.
  void run(int64_t tasks, TaskBody body, const void* context);

 private:
  // Which run it is, and its next task. A claim is a compare-exchange of both at once: one that succeeds read the
  // body of just this run, which cannot end before the task is done.
  using Ticket = uint64_t;
  static constexpr Ticket kNextRun = Ticket{1} << 32;
  static constexpr Ticket kNone = kNextRun - 1;  // as a task: of no run

  static Ticket next_task(Ticket ticket) { return ticket & kNone; }
  bool has_task(Ticket ticket) const { return next_task(ticket) < tasks_.load(std::memory_order_acquire); }
  bool work();
  bool is_done() const { return done_.load(std::memory_order_acquire) == tasks_.load(std::memory_order_relaxed); }
  bool has_news(int index) const;
  void finish_task();
  void help(int index);
  void start_threads(int count);
  void sleep_until_news(int index);
  void sleep_until_done();

  std::atomic<Ticket> ticket_{kNone};
  std::atomic<Ticket> tasks_{0};
  std::atomic<Ticket> done_{0};
  std::atomic<TaskBody> body_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<bool> taken_{false};
  std::atomic<int> limit_{0};  // helpers of this call

  std::mutex mutex_;  // of who sleeps
  std::condition_variable news_;
  std::condition_variable all_done_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  int started_ = 0;  // by who took them
};

}  // namespace moeq::cpu
