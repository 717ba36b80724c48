#include "cores.h"

#ifdef __linux__
#include <dirent.h>
#include <sched.h>

#include <cstdlib>

namespace moeq::cpu {
namespace {

struct Cores {
  cpu_set_t sets[8] = {};  // of 1024 cores each
};

}  // namespace

void use_cores_of_process() {
  DIR* threads = opendir("/proc/self/task");
  if (threads == nullptr) return;
  Cores all;
  while (const dirent* thread = readdir(threads)) {
    const int id = std::atoi(thread->d_name);  // 0: "." and ".."
    Cores own;
    if (id > 0 && sched_getaffinity(id, sizeof(own), own.sets) == 0) {
      CPU_OR_S(sizeof(all), all.sets, all.sets, own.sets);
    }
  }
  closedir(threads);
  sched_setaffinity(0, sizeof(all), all.sets);  // a refusal leaves the thread what it has
}

}  // namespace moeq::cpu
#else
namespace moeq::cpu {
void use_cores_of_process() {}
}  // namespace moeq::cpu
#endif
