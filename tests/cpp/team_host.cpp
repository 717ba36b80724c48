// The judge of thread teams, and the passes that ask it, behind a C interface.
#include "../../csrc/cpu/parallel.h"

extern "C" {

// Calls that go alone after `late` late teams of two (each 1 ms of work, 9 ms in all), of which every `late` but the
// last follows when its alone calls are used up; `work` is the size of the calls that are counted.
int64_t alone_calls(int64_t late, int64_t work) {
  moeq::cpu::TeamJudge judge;
  for (int64_t i = 0; i < late; ++i) {
    while (judge.goes_alone(100)) {
    }
    judge.saw(2, 100, 9000000, 1000000);
  }
  int64_t alone = 0;
  while (alone < 1000 && judge.goes_alone(work)) ++alone;
  return alone;
}

// The same after `late` late teams, one that took what it computed, and a late one.
int64_t alone_calls_after_recovery(int64_t late) {
  moeq::cpu::TeamJudge judge;
  for (int64_t i = 0; i < late; ++i) judge.saw(2, 100, 9000000, 1000000);
  judge.saw(2, 100, 1100000, 1000000);
  judge.saw(2, 100, 9000000, 1000000);
  int64_t alone = 0;
  while (judge.goes_alone(100)) ++alone;
  return alone;
}

// Runs `calls` calls of `tasks` tasks on a pool whose second thread takes `delay_us` to come back, and says for each
// whether it went there; returns how often a task ran.
int64_t run_calls(int64_t calls, int64_t tasks, int64_t delay_us, int64_t* teams) {
  static int64_t delay;
  static int64_t asked;
  delay = delay_us;
  const moeq::cpu::Parallel parallel = {2, [](int, void (*body)(void*), void* context) {
                                          ++asked;
                                          std::thread other([=] {
                                            body(context);
                                            std::this_thread::sleep_for(std::chrono::microseconds(delay));
                                          });
                                          body(context);
                                          other.join();
                                        }};
  std::atomic<int64_t> ran{0};
  for (int64_t call = 0; call < calls; ++call) {
    asked = 0;
    moeq::cpu::Pass pass;
    pass.tasks = tasks;
    pass.context = &ran;
    pass.body = [](const void* count, int64_t) {
      const_cast<std::atomic<int64_t>*>(static_cast<const std::atomic<int64_t>*>(count))->fetch_add(1);
    };
    moeq::cpu::run_passes(parallel, &pass, 1, 1);
    teams[call] = asked;
  }
  return ran;
}
}
