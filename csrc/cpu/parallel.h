// Dynamic scheduling of several passes over whatever thread pool the caller brings.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace moeq::cpu {

// `run(threads, body, context)` calls body(context) once for each of `threads`, at once or one after
// the other, and waits.
struct Parallel {
  int threads;
  void (*run)(int threads, void (*body)(void*), void* context);
};

// One pass: independent tasks, none of which throws.
struct Pass {
  int64_t tasks = 0;
  void (*body)(const void* context, int64_t task) = nullptr;
  const void* context = nullptr;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
};

// Draws tasks until none is left, then waits for those that other threads are still at.
inline void work_on(Pass& pass) {
  while (true) {
    const int64_t task = pass.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= pass.tasks) break;
    pass.body(pass.context, task);
    pass.done.fetch_add(1, std::memory_order_release);
  }
  for (int spins = 0; pass.done.load(std::memory_order_acquire) < pass.tasks; ++spins) {
    if (spins > 2000) std::this_thread::yield();  // the other thread may have lost its core
  }
}

// Runs the passes in order, all within one hand-over to the thread pool. A pass ends when its tasks are
// done, not when every thread has arrived: a thread that comes late, or never, delays nobody. Who computes
// a task never changes its result.
inline void run_passes(const Parallel& parallel, Pass* passes, int count) {
  struct Context {
    Pass* passes;
    int count;
  } context{passes, count};
  auto body = [](void* opaque) {
    const Context& shared = *static_cast<Context*>(opaque);
    for (int i = 0; i < shared.count; ++i) work_on(shared.passes[i]);
  };
  if (parallel.threads == 1) {
    body(&context);
  } else {
    parallel.run(parallel.threads, body, &context);
  }
}

}  // namespace moeq::cpu
