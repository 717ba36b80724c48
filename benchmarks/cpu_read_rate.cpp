// How fast this CPU's threads read a layer's experts, and nothing else: the floor under bench_cpu.py at few tokens.
//
//     g++ -O3 -std=c++17 -pthread -mavx512f benchmarks/cpu_read_rate.cpp -o read_rate && ./read_rate [THREADS]
//     [SECONDS]
//
// A layer of 128 experts lies in huge pages. A call reads the experts that one token (8) or eight (51) choose, others
// in each call; every expert is divided evenly between the threads, which read 1 or 4 streams side by side, with the
// processor's prefetches alone or with ones of 1 or 4 kB ahead into the first cache. A line a case: median and best
// milliseconds of a call, and GB/s of the median.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr int kExperts = 128;
constexpr long kLine = 64;
std::atomic<int64_t> sink{0};

/// The sum of `lines` cache lines from `data` on, read as `streams` streams, each `ahead` bytes prefetched.
template <int streams>
__m512i read_lines(const char* data, long lines, long ahead) {
  __m512i sums[streams] = {};
  const long each = lines / streams;
  for (long i = 0; i < each; i++) {
    for (int s = 0; s < streams; s++) {
      const char* at = data + (s * each + i) * kLine;
      if (ahead != 0) {
        _mm_prefetch(at + ahead, _MM_HINT_T0);
      }
      sums[s] = _mm512_add_epi64(sums[s], _mm512_load_si512(at));
    }
  }
  for (int s = 1; s < streams; s++) {
    sums[0] = _mm512_add_epi64(sums[0], sums[s]);
  }
  return sums[0];
}

struct Case {
  int streams;
  long ahead;
};

/// Threads that wait for calls, spinning: what a call costs is what its reads cost.
class Readers {
 public:
  Readers(const char* layer, long expert_bytes, int threads) : layer_(layer), bytes_(expert_bytes), threads_(threads) {
    for (int t = 1; t < threads; t++) {
      others_.emplace_back([this, t] { serve(t); });
    }
  }
  ~Readers() {
    stop_ = true;
    for (std::thread& other : others_) {
      other.join();
    }
  }

  double milliseconds(const std::vector<int>& experts, Case how) {
    experts_ = &experts;
    how_ = how;
    const auto begin = std::chrono::steady_clock::now();
    done_.store(0);
    call_.fetch_add(1);
    read(0);
    while (done_.load(std::memory_order_acquire) != threads_ - 1) {
      _mm_pause();
    }
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  void serve(int t) {
    for (int64_t seen = 0; !stop_;) {
      if (call_.load(std::memory_order_acquire) == seen) {
        _mm_pause();
        continue;
      }
      seen++;
      read(t);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void read(int t) {
    const long lines = bytes_ / kLine / threads_;
    __m512i sum = {};
    for (const int expert : *experts_) {
      const char* part = layer_ + expert * bytes_ + t * lines * kLine;
      sum = _mm512_add_epi64(
          sum, how_.streams == 1 ? read_lines<1>(part, lines, how_.ahead) : read_lines<4>(part, lines, how_.ahead));
    }
    sink += _mm512_reduce_add_epi64(sum);
  }

  const char* layer_;
  long bytes_;
  int threads_;
  std::vector<std::thread> others_;
  std::atomic<int64_t> call_{0};
  std::atomic<int> done_{0};
  std::atomic<bool> stop_{false};
  const std::vector<int>* experts_ = nullptr;
  Case how_{1, 0};
};

void measure(const char* name, long expert_bytes, int threads, double seconds) {
  const long bytes = kExperts * expert_bytes;
  const long page = 1L << 21;
  const long mapped = (bytes + 2 * page) / page * page;
  void* memory = mmap(nullptr, mapped + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  char* layer = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page);
  madvise(layer, mapped, MADV_HUGEPAGE);
  for (long i = 0; i < bytes; i += 8) {
    *reinterpret_cast<int64_t*>(layer + i) = i;
  }
  Readers readers(layer, expert_bytes, threads);
  std::mt19937 random(0);
  std::vector<int> order(kExperts);
  for (int i = 0; i < kExperts; i++) {
    order[i] = i;
  }
  for (const int chosen : {8, 51}) {
    for (const Case how : {Case{1, 0}, Case{4, 0}, Case{4, 1024}, Case{4, 4096}}) {
      std::vector<double> times;
      const auto begin = std::chrono::steady_clock::now();
      while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
        std::shuffle(order.begin(), order.end(), random);
        times.push_back(readers.milliseconds({order.begin(), order.begin() + chosen}, how));
      }
      std::sort(times.begin(), times.end());
      const double median = times[times.size() / 2];
      std::printf(
          "%s, %d threads, %2d experts of %.2f MB, %d streams, %ld bytes ahead: %.3f ms (best %.3f), %.1f GB/s\n", name,
          threads, chosen, expert_bytes / 1e6, how.streams, how.ahead, median, times.front(),
          chosen * expert_bytes / median / 1e6);
      std::fflush(stdout);
    }
  }
  munmap(memory, mapped + page);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.5;
  const long values = 3L * 2048 * 768;  // of an expert of Qwen3-30B
  measure("nvfp4", values * 9 / 16, threads, seconds);
  measure("bf16", values * 2, threads, seconds);
  return 0;
}
