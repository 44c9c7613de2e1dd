// Products of a few rows with a panel of 8-bit floats, by dot products of bfloat16.
#pragma once

#include "products/float8_pass.h"
#include "dot_steps.h"
#include "float8_lines.h"

namespace outrider {

// Numbers are widened in the loop that multiplies them.
template <int M>
[[gnu::noinline]] void tile_float8(const Pass& pass) {
  const Float8Lines lines;
  constexpr int64_t kSteps = kChunk / 4;  // of two k, of a chunk
  __m512 sum[M][2];
  each_float8_group<M>(pass, [&](const Float8Group& group, float* sums) __attribute__((always_inline)) {
    if (group.fresh) {
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
    }
    const char* weight = group.values;
    int64_t line = group.line;
    for (int64_t chunk = 2 * group.index; chunk < 2 * group.index + 2; ++chunk) {
      const char* x = pass.chunk(chunk);
#pragma GCC unroll 1
      for (int64_t i = 0; i < kSteps; i += 2, x += 8, weight += 128) {
        pass.fetch(line++);
#pragma GCC unroll 2
        for (int64_t j = 0; j < 2; ++j) {
          step<Pairs, M>(sum, lines.load(weight + j * 64), lines.load(weight + j * 64 + 32), x + j * 4);
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      store(sums + m * kPanel, sum[m][0]);
      store(sums + m * kPanel + kLanes, sum[m][1]);
    }
  });
}

template <int M>
void multiply_float8(const Pass& pass) {
  tile_float8<M>(pass);
}

}  // namespace outrider
