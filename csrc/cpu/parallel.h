// Dynamic scheduling over whatever thread pool the caller brings.
#pragma once

#include <atomic>
#include <cstdint>

namespace moeq::cpu {

// `run(threads, body, context)` calls body(context) once on each of `threads` threads, and waits.
struct Parallel {
  int threads;
  void (*run)(int threads, void (*body)(void*), void* context);
};

// Calls body(task) for every task. Threads draw tasks from one counter, because experts with many
// tokens cost more than others; who computes a task never changes its result.
template <class Body>
void for_each_task(const Parallel& parallel, int64_t tasks, const Body& body) {
  if (parallel.threads == 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  struct Context {
    std::atomic<int64_t> next;
    int64_t tasks;
    const Body* body;
  } context{{0}, tasks, &body};
  const int threads = tasks < parallel.threads ? static_cast<int>(tasks) : parallel.threads;
  parallel.run(
      threads,
      [](void* opaque) {
        auto& shared = *static_cast<Context*>(opaque);
        while (true) {
          const int64_t task = shared.next.fetch_add(1, std::memory_order_relaxed);
          if (task >= shared.tasks) return;
          (*shared.body)(task);
        }
      },
      &context);
}

}  // namespace moeq::cpu
