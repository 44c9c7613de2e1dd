// Prefetch of weights into a core's L2 cache, a few cache lines at a time, while the core does other work.
//
// Matrix products are bound by memory; attention, norms, operand layout and barriers between them are not. During those, a
// thread prefetches the weights that its next products start with. The lines are spread out, because a core has few
// outstanding memory requests and a batch of prefetches would stall its other loads.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <vector>

#include "memory.h"

namespace outrider {

class alignas(64) WeightPrefetch {
 public:
  // Cache lines per call: in a barrier's spin loop, after a row's operand, after a part of attention.
  static constexpr int kSpinLines = 4, kRowLines = 16, kPartLines = 8;

  void clear() {
    ranges_.clear();
    enter(0);
    room_ = max_bytes();
  }

  // Append the byte range that the next product starts with.
  void add(const char* from, int64_t bytes) { ranges_.push_back({from, bytes}); }

  void fetch(int lines) {
    for (; lines > 0 && at_ < end_; --lines, at_ += kLine) prefetch_l2(at_);
    if (at_ >= end_) advance();
  }

  // The product with index `product` starts and reads its own range; prefetch continues with the ranges after it.
  void reached(size_t product) {
    if (range_ > product) {
      room_ += ranges_[product].bytes;
    } else {
      room_ = max_bytes();
      enter(product + 1);
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  struct Range {
    const char* from;
    int64_t bytes;
  };

  // Most prefetched bytes that are not yet used by their products: 3/8 of the L2 cache.
  static int64_t max_bytes() {
    static const int64_t cache = level2_cache();
    return cache > 0 ? cache / 8 * 3 : 0;
  }
  static int64_t level2_cache() {
    if (const int64_t known = sysconf(_SC_LEVEL2_CACHE_SIZE); known > 0) return known;
    int64_t kilobytes = 0;  // as Linux has it, because the C library of ARM does not know
    std::ifstream("/sys/devices/system/cpu/cpu0/cache/index2/size") >> kilobytes;
    return kilobytes * 1024;
  }

  void enter(size_t product) {
    range_ = product;
    at_ = end_ = nullptr;
  }

  // Start a range, continue it if its budget has room again, or move to the next one.
  void advance() {
    if (range_ >= ranges_.size() || room_ <= 0) return;
    const Range& current = ranges_[range_];
    if (at_ == current.from + current.bytes) return enter(range_ + 1);
    if (at_ == nullptr) at_ = current.from;
    const int64_t more = std::min(room_, current.from + current.bytes - at_);
    end_ = at_ + more;
    room_ -= more;
  }

  std::vector<Range> ranges_;       // one a product, in order
  size_t range_ = 0;                // index of the current one
  const char* at_ = nullptr;        // next address; null before the range starts
  const char* end_ = nullptr;       // end of the part within the budget
  int64_t room_ = 0;
};

}  // namespace outrider
