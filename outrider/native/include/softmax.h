// Partial softmax sums of splits, merged in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace outrider {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The running softmax of a query vector: largest score, and sum of weights relative to it.
struct Softmax {
  float largest, sum;
};

// Merges a split's result into the result of the splits before it. width: numbers of a value.
inline void merge(Softmax& total, float* totals, const Softmax& part, const float* sums, int64_t width) {
  if (part.sum == 0.0f) return;
  if (total.sum == 0.0f) {
    total = part;
    std::memcpy(totals, sums, width * sizeof(float));
    return;
  }
  const float largest = std::max(total.largest, part.largest);
  const float old = std::exp(total.largest - largest), fresh = std::exp(part.largest - largest);
  for (int64_t d = 0; d < width; d += kLanes) {
    const Mask mask = lanes(width - d);
    const Floats scaled = mul(load(totals + d, mask), floats(old));
    store(totals + d, fmadd(load(sums + d, mask), floats(fresh), scaled), mask);
  }
  // An explicit fma, so that every inlined copy rounds alike.
  total = {largest, std::fma(total.sum, old, part.sum * fresh)};
}

inline void divide(float* to, const float* sums, float sum, int64_t width) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const Mask mask = lanes(width - d);
    store(to + d, div(load(sums + d, mask), floats(sum)), mask);
  }
}

}  // namespace outrider
