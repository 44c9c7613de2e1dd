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
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t i = 0; i < width; i += kLanes) {
    const __m512 part = load(from + i, lanes(width - i));
    sum[i / kLanes % 2] = _mm512_fmadd_ps(part, part, sum[i / kLanes % 2]);
  }
  const float square = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1])) / float(width);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(square + norm.epsilon));
  for (int64_t i = 0; i < width; i += kLanes) {
    const __mmask16 mask = lanes(width - i);
    store(to + i, _mm512_mul_ps(_mm512_mul_ps(load(from + i, mask), scale), load(norm.weight + i, mask)), mask);
  }
}

}  // namespace outrider
