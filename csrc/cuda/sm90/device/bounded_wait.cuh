// Waits for other thread blocks, none of which is endless.
//
// What a block waits for comes within microseconds, unless ids change under a launch, so that blocks disagree about who
// sends what, or something is wrong. Then a wait is over after some seconds, in looks: under a debugger, a sanitizer or
// beside other processes, seconds go by in which a kernel hardly runs, and its looks with it.
#pragma once
#include <cstdint>

// As the host's <assert.h> declares it, but also where NDEBUG is set.
extern "C" __host__ __device__ void __assert_fail(const char* assertion, const char* file, unsigned int line,
                                                  const char* function) noexcept __attribute__((__noreturn__));

namespace moeq::sm90 {

class BoundedWait {
 public:
  // After each look in vain: whether it was the last one. Later ones come after a rest, so that their number is a time.
  __device__ __forceinline__ bool is_over() {
    ++looks_;
    if (!rests()) {
      return false;
    }
    __nanosleep(kRest);
    return looks_ > kLooks;
  }

  // Whether it has been long already.
  __device__ __forceinline__ bool rests() const { return looks_ >= kAtOnce; }

 private:
  static constexpr uint32_t kAtOnce = 1 << 12;  // some milliseconds
  static constexpr uint32_t kLooks = 1 << 21;
  static constexpr unsigned int kRest = 1000;  // ns, about; a look takes as long

  uint32_t looks_ = 0;
};

static __device__ uint32_t gave_up;  // whether a thread has, which then tells it

// Ends the launch, and with it all that the process does on the GPU. CUDA prints kernel, block and text, once: threads
// that come here later wait for the end. A kernel with wgmma must not call it: ptxas would put its wgmma in sequence.
__device__ __noinline__ inline void give_up [[noreturn]](const char* kernel, const char* text) {
  if (atomicExch(&gave_up, 1u) == 0) {
    __assert_fail(text, "torch_moe_ops", __LINE__, kernel);
  }
  while (true) {
    __nanosleep(1000000);
  }
}

}  // namespace moeq::sm90
