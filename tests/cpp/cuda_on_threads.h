// Enough of CUDA to run the kernels of csrc/cuda/expert_parallel with a thread of the CPU for each of theirs.
#pragma once
#include <atomic>
#include <barrier>
#include <cassert>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint4 {
  uint32_t x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};

struct Block {
  explicit Block(int threads) : barrier(threads) {}
  std::barrier<> barrier;
  uint32_t shared[8] = {};
};

inline thread_local Index threadIdx, blockIdx, gridDim;
inline thread_local Block* block;

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Now and then a thread is late, so that orders occur that would be rare.
inline void be_late() {
  static thread_local std::mt19937 random(std::hash<std::thread::id>()(std::this_thread::get_id()));
  if (random() % 20 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  }
}

inline void __syncthreads() {
  block->barrier.arrive_and_wait();
  be_late();
}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long value) {
  return reinterpret_cast<std::atomic<unsigned long long>*>(p)->fetch_add(value);
}
inline int atomicExch(int* p, int value) { return reinterpret_cast<std::atomic<int>*>(p)->exchange(value); }

template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint16_t __float2bfloat16_rn(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t __bfloat16_as_ushort(uint16_t value) { return value; }
inline uint16_t __float2half_rn(float) { return 0; }  // no case of the test has it
inline uint16_t __half_as_ushort(uint16_t value) { return value; }

inline void store_flag(uint64_t* flag, uint64_t value) {
  reinterpret_cast<std::atomic<uint64_t>*>(flag)->store(value, std::memory_order_release);
}
inline uint64_t load_flag(const uint64_t* flag) {
  return reinterpret_cast<const std::atomic<uint64_t>*>(flag)->load(std::memory_order_acquire);
}
inline uint64_t clock_ns() {
  std::this_thread::yield();
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// Two words, each of them whole, in any order; a wait for them lets other threads run.
template <class Pair>
void store_words_of(Pair* target, const Pair& words) {
  be_late();
  reinterpret_cast<std::atomic<uint64_t>*>(&target->second)->store(words.second, std::memory_order_relaxed);
  be_late();
  reinterpret_cast<std::atomic<uint64_t>*>(&target->first)->store(words.first, std::memory_order_relaxed);
}
template <class Pair>
Pair load_words_of(const Pair* source) {
  std::this_thread::yield();
  const auto* first = reinterpret_cast<const std::atomic<uint64_t>*>(&source->first);
  const auto* second = reinterpret_cast<const std::atomic<uint64_t>*>(&source->second);
  return {first->load(std::memory_order_relaxed), second->load(std::memory_order_relaxed)};
}
