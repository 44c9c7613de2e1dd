// Aligned memory for numbers, on huge pages if the system has them.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#include "processor.h"

namespace outrider {

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) : bytes_(bytes), memory_(allocate(bytes), std::free), data_(memory_.get()) {}

  // A step reads all weights, which would cause TLB misses throughout. So buffers too small for huge pages of their own
  // share a slab on huge pages, freed with its last buffer.
  static Buffer beside_others(size_t bytes) {
    if (bytes > kSlab / 4) return Buffer(bytes);
    static std::mutex mutex;
    static std::weak_ptr<void> slab;
    static size_t used = 0;
    std::lock_guard<std::mutex> lock(mutex);
    Buffer made;
    made.memory_ = slab.lock();
    if (!made.memory_ || used + bytes > kSlab) {
      made.memory_ = std::shared_ptr<void>(allocate(kSlab), std::free);
      slab = made.memory_;
      used = 0;
    }
    made.bytes_ = bytes;
    made.data_ = static_cast<char*>(made.memory_.get()) + used;
    used += round_up(bytes, kLine);
    return made;
  }

  // A view of memory that its owner frees, after this buffer.
  static Buffer view(void* data, size_t bytes) {
    Buffer made;
    made.bytes_ = bytes;
    made.data_ = data;
    return made;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kLine = 64, kHugePage = size_t{2} << 20, kSlab = size_t{32} << 20;

  static void* allocate(size_t bytes) {
    const size_t step = bytes >= kHugePage ? kHugePage : kLine;
    void* data = std::aligned_alloc(step, round_up(bytes ? bytes : 1, step));
    if (data == nullptr) throw std::bad_alloc();
    if (step == kHugePage) madvise(data, round_up(bytes, step), MADV_HUGEPAGE);
    return data;
  }

  size_t bytes_ = 0;
  std::shared_ptr<void> memory_;  // its own allocation, or a shared slab
  void* data_ = nullptr;
};

}  // namespace outrider
