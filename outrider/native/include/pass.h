// What one pass over a panel multiplies, and the bytes that it fetches meanwhile.
#pragma once

#include "operand.h"
#include "simd.h"
#include "weight.h"

namespace outrider {

// A pass that streams takes its weights in two strides, or it would wait for them where it keeps the arithmetic busy:
// from memory into the second cache far ahead, from there into the first a little ahead of where they are needed. In bytes.
constexpr int64_t kNear = 1024, kFar = 7168;  // the far one lies so much behind the near one

struct Pass {
  const Weight& weight;
  int64_t panel;
  const Operand& x;
  int64_t row;        // the first
  const char* ahead;  // what is to be brought near meanwhile: 2 `ahead_step` bytes for 128 bytes of the panel
  int64_t ahead_step;
  bool streams;       // the pass that takes the panel from memory by itself
  float* tile;        // [rows, 32], the results

  const char* begin() const { return weight.panel(panel); }
  const char* chunk(int64_t index) const { return x.data + (index * x.rows + row) * bytes_of_chunk(weight.format); }
  int64_t chunks() const { return chunks_of(weight); }
  void fetch(int64_t step) const {
    const char* from = ahead + 2 * step * ahead_step;
    if (streams) {
      to_second_cache(from + kFar);
      to_second_cache(from + kFar + ahead_step);
    }
    to_first_cache(from);
    to_first_cache(from + ahead_step);
  }
  // The same in two parts, of which each falls to one of two runs: all at once, they would wait for one another.
  void fetch_half(int64_t step, int64_t half) const {
    const char* from = ahead + (2 * step + half) * ahead_step;
    if (streams) to_second_cache(from + kFar);
    to_first_cache(from);
  }
  // int8: the results of so many rows times their outputs' scales.
  void scale_columns(int64_t rows) const {
    const float* scales = weight.scales + panel * kPanel;
    const Floats columns[2] = {load(scales), load(scales + kLanes)};
    for (int64_t i = 0; i < 2 * rows; ++i) {
      store(tile + i * kLanes, mul(load(tile + i * kLanes), columns[i % 2]));
    }
  }
};

}  // namespace outrider
