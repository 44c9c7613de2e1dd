// One pass over a panel: its operands, and the bytes that it prefetches meanwhile.
#pragma once

#include "products/operand.h"
#include "simd.h"
#include "weights/weight.h"

namespace outrider {

// A streaming pass prefetches weights at two distances: far ahead from memory into L2, and near ahead from L2 into L1. With
// one distance it would wait for memory while the arithmetic is busy. In bytes; kFar is added to kNear.
constexpr int64_t kNear = 1024, kFar = 7168;

struct Pass {
  const Weight& weight;
  int64_t panel;
  const Operand& x;
  int64_t row;        // first row
  const char* ahead;  // prefetched meanwhile: 2 * ahead_step bytes for every 128 bytes of the panel
  int64_t ahead_step;
  bool streams;       // this pass reads the panel from memory
  float* tile;        // [rows, 32], the results
  // The chunks first_chunk .. end_chunk - 1 of k, by default all. Those before have left their part of the results in the tile.
  int64_t first_chunk = 0, end_chunk = chunks_of(weight);

  const char* begin() const { return weight.panel(panel); }
  const char* chunk(int64_t index) const { return x.data + (index * x.rows + row) * bytes_of_chunk(weight.format); }
  int64_t chunks() const { return chunks_of(weight); }
  bool begins() const { return first_chunk == 0; }
  bool ends() const { return end_chunk == chunks(); }
  void fetch(int64_t step) const {
    const char* from = ahead + 2 * step * ahead_step;
    if (streams) {
      prefetch_l2(from + kFar);
      prefetch_l2(from + kFar + ahead_step);
    }
    prefetch_l1(from);
    prefetch_l1(from + ahead_step);
  }
  // Half of `fetch`, for kernels that make two runs over a block: prefetches issued together would stall.
  void fetch_half(int64_t step, int64_t half) const {
    const char* from = ahead + (2 * step + half) * ahead_step;
    if (streams) prefetch_l2(from + kFar);
    prefetch_l1(from);
  }
  // int8: multiply the results of `rows` rows by the scales of their outputs.
  void scale_columns(int64_t rows) const {
    const float* scales = weight.scales + panel * kPanel;
    const Floats columns[2] = {load(scales), load(scales + kLanes)};
    for (int64_t i = 0; i < 2 * rows; ++i) {
      store(tile + i * kLanes, mul(load(tile + i * kLanes), columns[i % 2]));
    }
  }
};

}  // namespace outrider
