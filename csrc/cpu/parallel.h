// Dynamic scheduling of several passes over whatever thread pool the caller brings.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "helpers.h"
#include "team.h"

namespace moeq::cpu {

// `run(threads, body, context)` calls body(context) once for each of `threads`, at once or one after
// the other, and waits. The calling thread is one of them.
struct Parallel {
  int threads;
  void (*run)(int threads, void (*body)(void*), void* context);
};

constexpr int64_t kNoTask = -1;

// One pass: independent tasks, none of which throws.
struct Pass {
  int64_t tasks = 0;
  // next: the task that this thread does then, of which it may ask for memory ahead; kNoTask where it has drawn none.
  void (*body)(const void* context, int64_t task, int64_t next) = nullptr;
  const void* context = nullptr;
  int64_t drawn_ahead = 0;  // while a thread does a task before this one, it has drawn its next one
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  bool is_done() const { return done.load(std::memory_order_acquire) >= tasks; }
};

// Draws tasks until none is left, then waits for those that other threads are still at. Returns the nanoseconds of
// waiting.
inline int64_t work_on(Pass& pass) {
  auto draw = [&] { return pass.next.fetch_add(1, std::memory_order_relaxed); };
  for (int64_t task = draw(); task < pass.tasks;) {
    const int64_t next = task < pass.drawn_ahead ? draw() : kNoTask;
    pass.body(pass.context, task, next < pass.tasks ? next : kNoTask);
    pass.done.fetch_add(1, std::memory_order_release);
    task = next == kNoTask ? draw() : next;
  }
  if (pass.is_done()) return 0;
  const int64_t start = nanoseconds();
  for (int spins = 0; !pass.is_done(); ++spins) {
    if (spins > 2000) std::this_thread::yield();  // the other thread may have lost its core
  }
  return nanoseconds() - start;
}

// Runs the passes in order, all within one hand-over to the thread pool. A pass ends when its tasks are
// done, not when every thread has arrived. Who computes a task never changes its result. `work` is a measure of the
// call's size.
inline void run_passes(const Parallel& parallel, Pass* passes, int count, int64_t work) {
  static TeamJudge judge;
  struct Context {
    Pass* passes;
    int count;
    std::thread::id caller;
    int64_t busy;  // nanoseconds of the caller's own work
  } context{passes, count, std::this_thread::get_id(), 0};
  auto body = [](void* opaque) {
    Context& shared = *static_cast<Context*>(opaque);
    const int64_t start = nanoseconds();
    int64_t waited = 0;
    for (int i = 0; i < shared.count; ++i) waited += work_on(shared.passes[i]);
    if (std::this_thread::get_id() == shared.caller) shared.busy += nanoseconds() - start - waited;
  };
  if (parallel.threads == 1) return body(&context);
  if (judge.does_without(work)) {
    Helpers& helpers = Helpers::of_process();
    if (!helpers.take(parallel.threads - 1)) return body(&context);
    auto task_of = [](const void* pass, int64_t task) {
      const Pass& self = *static_cast<const Pass*>(pass);
      self.body(self.context, task, kNoTask);
    };
    for (int i = 0; i < count; ++i) helpers.run(passes[i].tasks, task_of, &passes[i]);
    return helpers.give_back();
  }
  const int64_t start = nanoseconds();
  parallel.run(parallel.threads, body, &context);
  judge.saw(work, nanoseconds() - start, context.busy);
}

}  // namespace moeq::cpu
