#include "helpers.h"

#include <pthread.h>

#include <system_error>
#include <thread>

#include "cores.h"

namespace moeq::cpu {
namespace {

constexpr int kSpins =
    1000;  // some tens of microseconds: the passes between two of a call, or the way to the next call

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
bool spin_until(Condition condition) {
  for (int i = 0; i < kSpins; ++i) {
    if (condition()) return true;
    pause();
  }
  return false;
}

std::atomic<Helpers*> of_this_process{nullptr};

}  // namespace

// Never freed: its threads sleep in it until the process ends.
Helpers& Helpers::of_process() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { of_this_process.store(nullptr); });
  static_cast<void>(registered);
  Helpers* known = of_this_process.load();
  if (known != nullptr) return *known;
  auto* made = new Helpers;
  if (of_this_process.compare_exchange_strong(known, made)) return *made;
  delete made;
  return *known;
}

bool Helpers::take(int count) {
  if (taken_.exchange(true, std::memory_order_acquire)) return false;
  limit_.store(count, std::memory_order_relaxed);
  start_threads(count);
  return true;
}

void Helpers::give_back() { taken_.store(false, std::memory_order_release); }

void Helpers::start_threads(int count) {
  try {
    for (; started_ < count; ++started_) std::thread([this, index = started_] { help(index); }).detach();
  } catch (const std::system_error&) {  // as many as the system has for us
  }
}

void Helpers::run(int64_t tasks, TaskBody body, const void* context) {
  if (tasks < 2) {
    if (tasks > 0) body(context, 0);
    return;
  }
  // Closed while it changes: a claim by the ticket of the last run must not see the tasks of this one.
  const Ticket closed = ticket_.load(std::memory_order_relaxed) | kNone;
  ticket_.store(closed);
  // Release: who sees these tasks sees the ticket closed, and its claim by the old one fails.
  tasks_.store(static_cast<Ticket>(tasks), std::memory_order_release);
  done_.store(0, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  ticket_.store(closed + 1);  // the next run, task 0
  if (sleepers_.load() > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    news_.notify_all();
  }
  while (work()) {
  }
  if (!spin_until([this] { return is_done(); })) sleep_until_done();
}

// One task, if there is one.
bool Helpers::work() {
  Ticket ticket = ticket_.load(std::memory_order_acquire);
  while (has_task(ticket)) {
    const TaskBody body = body_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    body(context, static_cast<int64_t>(next_task(ticket)));
    finish_task();
    return true;
  }
  return false;
}

void Helpers::finish_task() {
  const Ticket tasks = tasks_.load(std::memory_order_relaxed);  // the run cannot end before this task
  if (done_.fetch_add(1) + 1 < tasks || !caller_sleeps_.load()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  all_done_.notify_one();
}

void Helpers::sleep_until_done() {
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_.store(true);
  all_done_.wait(lock, [this] { return done_.load() == tasks_.load(); });
  caller_sleeps_.store(false);
}

bool Helpers::has_news(int index) const {
  return index < limit_.load(std::memory_order_relaxed) && has_task(ticket_.load());
}

void Helpers::sleep_until_news(int index) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++sleepers_;
  news_.wait(lock, [this, index] { return has_news(index); });
  --sleepers_;
}

void Helpers::help(int index) {
  use_cores_of_process();
  while (true) {
    if (!spin_until([this, index] { return has_news(index); })) sleep_until_news(index);
    while (work()) {
    }
  }
}

}  // namespace moeq::cpu
