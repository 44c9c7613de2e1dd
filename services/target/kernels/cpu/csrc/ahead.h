// Weights on their way into a core's second cache, a little at a time, while the core is busy with something else.
//
// Products wait for memory, and what stands between them does not: attention, norms, the layout of operands, waiting for
// one another. There a thread asks for the weights that it will begin its next products with. A core has few requests under
// way at a time, so a burst of them would hold up whatever else it does.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace outrider {

class alignas(64) Ahead {
 public:
  static constexpr int kWaiting = 4, kRow = 16, kPart = 8;  // lines: while waiting, behind a row, behind a part of attention

  void clear() {
    stretches_.clear();
    enter(0);
    room_ = most();
  }

  // What the next product begins with.
  void add(const char* from, int64_t bytes) { stretches_.push_back({from, bytes}); }

  void bring(int lines) {
    for (; lines > 0 && at_ < end_; --lines, at_ += kLine) to_second_cache(at_);
    if (at_ >= end_) go_on();
  }

  // The product of a place reads its stretch now, and what it has not got yet.
  void reached(size_t place) {
    if (stretch_ > place) {
      room_ += stretches_[place].bytes;
    } else {
      room_ = most();
      enter(place + 1);
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  struct Stretch {
    const char* from;
    int64_t bytes;
  };

  // Bytes that may wait for their products.
  static int64_t most() {
    static const int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return cache > 0 ? cache / 8 * 3 : 0;
  }

  void enter(size_t place) {
    stretch_ = place;
    at_ = end_ = nullptr;
  }

  // Begin with a stretch, go on with it if there is room again, or leave it behind.
  void go_on() {
    if (stretch_ >= stretches_.size() || room_ <= 0) return;
    const Stretch& one = stretches_[stretch_];
    if (at_ == one.from + one.bytes) return enter(stretch_ + 1);
    if (at_ == nullptr) at_ = one.from;
    const int64_t more = std::min(room_, one.from + one.bytes - at_);
    end_ = at_ + more;
    room_ -= more;
  }

  std::vector<Stretch> stretches_;  // of each product, in order
  size_t stretch_ = 0;              // the one under way
  const char* at_ = nullptr;        // what is asked for next; null before it begins
  const char* end_ = nullptr;       // of what there is room for
  int64_t room_ = 0;
};

}  // namespace outrider
