// Calls of the experts that are bound once and run later, known by numbers: a host node of a CUDA graph keeps no more
// of them, and finds nothing to run, instead of freed memory, where one was dropped.
#pragma once

#include <cstdint>
#include <memory>

#include "isa.h"
#include "parallel.h"

namespace moeq::cpu {

// Results are float32.
struct HostJob {
  ExpertsArgs args;
  const IsaTable* isa = nullptr;
  Dot dot;
  Parallel parallel{1, nullptr};  // of the thread that binds: torch's number of threads is another one elsewhere
  std::shared_ptr<const void> owned;  // what holds the memory that args points to
};

// Returns its number, never 0 and never given twice.
int64_t add_host_job(HostJob job);

// Waits for a run of it that is under way; its memory is freed by the thread that calls this.
void drop_host_job(int64_t number);

// From now on the first number means what the second one did, which means nothing any more.
void replace_host_job(int64_t number, int64_t by);

// What the driver is given: runs the job of this number, if there is one. One job runs at a time, as they share the
// cores. Throws nothing, calls neither CUDA nor Python; results are NaN where memory was lacking.
void run_host_job(void* number);

}  // namespace moeq::cpu
