// Scratch memory of one call. A thread keeps its block between calls, because fresh pages cost more than the work of a
// small call and a third of a large one's; only blocks beyond what layers of common sizes need go back at once. Large
// blocks ask for huge pages.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace moeq::cpu {

class Workspace {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kKeptBytes = size_t{256} << 20;  // 1024 tokens of a layer with 8 experts of 2048 x 768
  static constexpr size_t kHugePage = size_t{2} << 20;

  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(block_); }

  // Begins a walk over the buffers. While measuring, take() only adds sizes up; then room for the sum
  // is made, and the same calls hand it out.
  void start(bool measure) {
    if (!measure && used_ > size_) grow(used_);
    used_ = 0;
    measuring_ = measure;
  }

  template <class T>
  T* take(int64_t count) {
    T* result = measuring_ ? nullptr : reinterpret_cast<T*>(block_ + used_);
    used_ += padded(static_cast<size_t>(count) * sizeof(T));
    return result;
  }

  // Gives a large block back.
  void trim() {
    if (size_ > kKeptBytes) release();
  }

 private:
  static size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  void release() {
    std::free(block_);
    block_ = nullptr;
    size_ = 0;
  }

  void grow(size_t bytes) {
    release();
    const bool huge = bytes >= 2 * kHugePage;
    if (huge) bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    block_ = static_cast<uint8_t*>(std::aligned_alloc(huge ? kHugePage : kAlignment, bytes));
    if (block_ == nullptr) throw std::bad_alloc();
    size_ = bytes;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (huge) (void)madvise(block_, bytes, MADV_HUGEPAGE);  // where the system has none, plain pages do
#endif
  }

  uint8_t* block_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;
  bool measuring_ = false;
};

}  // namespace moeq::cpu
