#include "host_jobs.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "experts.h"

namespace moeq::cpu {
namespace {

std::mutex mutex;  // held through a run as well
std::unordered_map<int64_t, HostJob>& jobs() {
  static auto* known = new std::unordered_map<int64_t, HostJob>;  // outlives the driver's threads at the process's end
  return *known;
}

// Where all experts of all tokens lie elsewhere, no thread is woken.
bool has_work(const ExpertsArgs& args) {
  const int32_t* ids = args.topk_ids;
  return std::any_of(ids, ids + args.num_tokens * args.top_k, [&](int32_t id) {
    const int64_t local = static_cast<int64_t>(id) - args.expert_offset;
    return local >= 0 && local < args.num_experts;
  });
}

void run(const HostJob& job) noexcept {
  const ExpertsArgs& args = job.args;
  auto* out = static_cast<float*>(args.out);
  const int64_t values = args.num_tokens * args.hidden_size;
  try {
    if (has_work(args)) {
      run_experts(args, *job.isa, job.dot, job.parallel);
    } else {
      std::memset(out, 0, static_cast<size_t>(values) * sizeof(float));
    }
  } catch (const std::exception&) {  // nobody is there to catch it
    std::fill(out, out + values, std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace

int64_t add_host_job(HostJob job) {
  static int64_t last = 0;
  std::lock_guard<std::mutex> lock(mutex);
  jobs().emplace(++last, std::move(job));
  return last;
}

void drop_host_job(int64_t number) {
  HostJob dropped;  // freed without the mutex
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = jobs().find(number);
  if (found == jobs().end()) return;
  dropped = std::move(found->second);
  jobs().erase(found);
}

void replace_host_job(int64_t number, int64_t by) {
  HostJob replaced;  // freed without the mutex
  std::lock_guard<std::mutex> lock(mutex);
  const auto known = jobs().find(number);
  const auto fresh = jobs().find(by);
  if (known == jobs().end() || fresh == jobs().end()) return;
  replaced = std::move(known->second);
  known->second = std::move(fresh->second);
  jobs().erase(fresh);
}

void run_host_job(void* number) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = jobs().find(static_cast<int64_t>(reinterpret_cast<intptr_t>(number)));
  if (found != jobs().end()) run(found->second);
}

}  // namespace moeq::cpu
