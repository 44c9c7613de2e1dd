// Prefetch of keys and values into a core's L2 cache while the core computes the attention of another task.
//
// Pages are scattered, and waiting for them would take longer than the arithmetic. So a thread prefetches the rows of its
// next task one cache line at a time: a core has few outstanding requests, and drops or stalls on many issued at once.
#pragma once

#include <cstdint>

#include "memory.h"

namespace outrider {

class KvPrefetch {
 public:
  static constexpr int kMaxRows = 256;  // rows

  void clear() { rows_ = row_ = 0; }

  // Start over. Rows added from here on alternate between two sizes, in bytes.
  void begin(int64_t even, int64_t odd) {
    clear();
    offset_ = 0;
    bytes_[0] = even, bytes_[1] = odd;
  }

  void add(const void* row) { row_at_[rows_++] = static_cast<const char*>(row); }

  // Prefetch one more line. Inner loops call this, so it is cheap.
  void fetch_line() {
    if (row_ >= rows_) return;
    prefetch_l2(row_at_[row_] + offset_);
    advance();
  }

  // Fetch the remaining lines. By loads, because some processors drop prefetches when many are outstanding; processors with
  // a matrix unit do not.
  template <bool kPrefetches>
  void finish() {
    for (; row_ < rows_; advance()) {
      const char* line = row_at_[row_] + offset_;
      if constexpr (kPrefetches) prefetch_l2(line);
      else (void)*static_cast<const volatile char*>(line);
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  void advance() {
    if ((offset_ += kLine) >= bytes_[row_ % 2]) offset_ = 0, ++row_;
  }

  int rows_ = 0, row_ = 0;
  int64_t offset_ = 0, bytes_[2] = {};
  const char* row_at_[kMaxRows];
};

}  // namespace outrider
