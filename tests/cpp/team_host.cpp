// The judge of thread teams, the passes that ask it, and the helpers in their place, behind a C interface.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "../../csrc/cpu/cores.cpp"
#include "../../csrc/cpu/helpers.cpp"
#include "../../csrc/cpu/parallel.h"

extern "C" {

// Calls that go alone after `late` late teams (1 ms of the caller's work, 9 ms in all), of which every `late` but the
// last follows when its alone calls are used up; `work` is the size of the calls that are counted.
int64_t alone_calls(int64_t late, int64_t work) {
  moeq::cpu::TeamJudge judge;
  for (int64_t i = 0; i < late; ++i) {
    while (judge.does_without(100)) {
    }
    judge.saw(100, 9000000, 1000000);
  }
  int64_t alone = 0;
  while (alone < 1000 && judge.does_without(work)) ++alone;
  return alone;
}

// The same after `late` late teams, one that took what it computed, and a late one.
int64_t alone_calls_after_recovery(int64_t late) {
  moeq::cpu::TeamJudge judge;
  for (int64_t i = 0; i < late; ++i) judge.saw(100, 9000000, 1000000);
  judge.saw(100, 1100000, 1000000);
  judge.saw(100, 9000000, 1000000);
  int64_t alone = 0;
  while (judge.does_without(100)) ++alone;
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
    pass.body = [](const void* count, int64_t, int64_t) {
      const_cast<std::atomic<int64_t>*>(static_cast<const std::atomic<int64_t>*>(count))->fetch_add(1);
    };
    moeq::cpu::run_passes(parallel, &pass, 1, 1);
    teams[call] = asked;
  }
  return ran;
}

// What `runs` passes of 0, 1, 2, ... tasks by `threads` threads did wrong: tasks that did not run just once, and tasks
// behind one that had been told of another; each pass draws ahead up to another task. `told`: how often one was.
int64_t wrong_passes(int64_t runs, int64_t threads, int64_t* told) {
  struct Run {
    std::vector<std::atomic<int>> seen;
    std::atomic<int64_t> wrong{0};
    std::atomic<int64_t> told{0};
  };
  static thread_local int64_t promised;
  int64_t wrong = 0;
  *told = 0;
  for (int64_t i = 0; i < runs; ++i) {
    Run run{std::vector<std::atomic<int>>(static_cast<size_t>(i % 67))};
    moeq::cpu::Pass pass;
    pass.tasks = i % 67;
    pass.drawn_ahead = i % 71 - 3;
    pass.context = &run;
    pass.body = [](const void* context, int64_t task, int64_t next) {
      auto& run = *const_cast<Run*>(static_cast<const Run*>(context));
      run.seen.at(static_cast<size_t>(task)).fetch_add(1);
      run.wrong += promised != moeq::cpu::kNoTask && promised != task;
      run.told += next != moeq::cpu::kNoTask;
      promised = next;
    };
    std::vector<std::thread> team;
    for (int64_t thread = 0; thread < threads; ++thread) {
      team.emplace_back([&] {
        promised = moeq::cpu::kNoTask;
        moeq::cpu::work_on(pass);
        run.wrong += promised != moeq::cpu::kNoTask;
      });
    }
    for (std::thread& thread : team) thread.join();
    for (const auto& seen : run.seen) wrong += seen != 1;
    wrong += run.wrong;
    *told += run.told;
  }
  return wrong;
}

// What `runs` runs of 0, 1, 2, ... tasks by `count` helpers and this thread did wrong: tasks that did not run just
// once, with the context of their run, or -1 where the helpers could not be had.
int64_t wrong_tasks(int64_t runs, int64_t count) {
  struct Run {
    std::vector<std::atomic<int>> seen;
  };
  moeq::cpu::Helpers& helpers = moeq::cpu::Helpers::of_process();
  int64_t wrong = 0;
  for (int64_t i = 0; i < runs; ++i) {
    const int64_t tasks = i % 67;
    Run run{std::vector<std::atomic<int>>(static_cast<size_t>(tasks))};
    if (!helpers.take(static_cast<int>(count))) return -1;
    helpers.run(
        tasks,
        [](const void* context, int64_t task) {
          auto* seen = const_cast<Run*>(static_cast<const Run*>(context));
          seen->seen.at(static_cast<size_t>(task)).fetch_add(1);
        },
        &run);
    helpers.give_back();
    for (const auto& seen : run.seen) wrong += seen != 1;
  }
  return wrong;
}

// The same in a child of fork(), which has none of its parent's threads; 255 at most.
int64_t wrong_tasks_in_a_child(int64_t runs, int64_t count) {
  moeq::cpu::Helpers::of_process().take(1);  // as a thread of the parent may just now have them
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const int64_t wrong = wrong_tasks(runs, count);
    _exit(wrong < 0 || wrong > 254 ? 255 : static_cast<int>(wrong));
  }
  moeq::cpu::Helpers::of_process().give_back();
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

// Whether a second call gets the helpers while a first one has them, and after it.
int64_t taken_twice() {
  moeq::cpu::Helpers& helpers = moeq::cpu::Helpers::of_process();
  helpers.take(1);
  const bool twice = helpers.take(1);
  helpers.give_back();
  const bool after = helpers.take(1);
  helpers.give_back();
  return twice * 2 + after;
}

// Milliseconds of a run of two tasks, one of which ends at once, while the only helper sleeps in a task of its own
// for `late_ms`; the helper's task is the first that it finds.
int64_t run_beside_a_late_helper(int64_t late_ms) {
  struct Run {
    std::thread::id caller;
    int64_t late_ms;
    std::atomic<bool> helped;
  } run{std::this_thread::get_id(), late_ms, {false}};
  moeq::cpu::Helpers& helpers = moeq::cpu::Helpers::of_process();
  helpers.take(1);
  const int64_t start = moeq::cpu::nanoseconds();
  helpers.run(
      2,
      [](const void* context, int64_t) {
        auto& run = *const_cast<Run*>(static_cast<const Run*>(context));
        if (std::this_thread::get_id() == run.caller) {
          while (!run.helped) std::this_thread::yield();
          return;
        }
        run.helped = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(run.late_ms));
      },
      &run);
  const int64_t elapsed = (moeq::cpu::nanoseconds() - start) / 1000000;
  helpers.give_back();
  return elapsed;
}

// How many cores a helper may use whose caller is bound to the first that this process has, as OpenMP binds it.
int64_t cores_of_a_helper_of_a_bound_caller() {
  static auto& helpers = *new moeq::cpu::Helpers;  // its thread outlives this call
  static std::atomic<int> cores{0};
  std::thread([] {
    cpu_set_t mine;
    sched_getaffinity(0, sizeof(mine), &mine);
    int first = 0;
    while (!CPU_ISSET(first, &mine)) ++first;
    CPU_ZERO(&mine);
    CPU_SET(first, &mine);
    sched_setaffinity(0, sizeof(mine), &mine);
    const std::thread::id caller = std::this_thread::get_id();
    helpers.take(1);
    helpers.run(
        2,
        [](const void* context, int64_t) {
          if (std::this_thread::get_id() == *static_cast<const std::thread::id*>(context)) {
            while (cores == 0) std::this_thread::yield();
            return;
          }
          cpu_set_t own;
          sched_getaffinity(0, sizeof(own), &own);
          cores = CPU_COUNT(&own);
        },
        &caller);
    helpers.give_back();
  }).join();
  return cores;
}
}
