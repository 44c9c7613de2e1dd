// Root-mean-square norms.
#pragma once

#include <cmath>

#include "simd.h"

namespace outrider {

constexpr int64_t kNormWidth = 16384;  // at most

struct Norm {
  const float* weight = nullptr;  // [width]; null is no norm
  float epsilon = 0.0f;
};

// from normalised by its root mean square, times the weight. to may be from.
inline void normalise(const Norm& norm, const float* from, float* to, int64_t width) {
  Floats sum[2] = {floats(), floats()};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats part = load(from + i, lanes(width - i));
    sum[i / kLanes % 2] = fmadd(part, part, sum[i / kLanes % 2]);
  }
  const float square = sum_of(add(sum[0], sum[1])) / float(width);
  const Floats scale = floats(1.0f / std::sqrt(square + norm.epsilon));
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask mask = lanes(width - i);
    store(to + i, mul(mul(load(from + i, mask), scale), load(norm.weight + i, mask)), mask);
  }
}

}  // namespace outrider
