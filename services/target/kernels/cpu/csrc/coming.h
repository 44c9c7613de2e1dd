// Keys and values on their way into a core's second cache, while the core attends to others.
//
// They lie scattered, and waiting for them would take longer than the arithmetic. So a thread asks for those of its next
// task meanwhile, a line at a time: a core has few requests under way, and drops or waits for what comes in a burst.
#pragma once

#include <cstdint>

#include "memory.h"

namespace outrider {

class Coming {
 public:
  static constexpr int kMost = 256;  // rows

  void clear() { rows_ = row_ = 0; }

  // Begin anew; rows that are added come in turns of two kinds, of so many bytes.
  void begin(int64_t even, int64_t odd) {
    clear();
    offset_ = 0;
    bytes_[0] = even, bytes_[1] = odd;
  }

  void add(const void* row) { row_at_[rows_++] = static_cast<const char*>(row); }

  // Ask for one line more. This stands in inner loops, so it is little.
  void ask() {
    if (row_ >= rows_) return;
    to_second_cache(row_at_[row_] + offset_);
    go_on();
  }

  // Have what nobody has asked for yet. By loads, because some processors drop prefetches when many are under way; not so
  // those with a matrix unit.
  template <bool kPrefetches>
  void finish() {
    for (; row_ < rows_; go_on()) {
      const char* line = row_at_[row_] + offset_;
      if constexpr (kPrefetches) to_second_cache(line);
      else (void)*static_cast<const volatile char*>(line);
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  void go_on() {
    if ((offset_ += kLine) >= bytes_[row_ % 2]) offset_ = 0, ++row_;
  }

  int rows_ = 0, row_ = 0;
  int64_t offset_ = 0, bytes_[2] = {};
  const char* row_at_[kMost];
};

}  // namespace outrider
