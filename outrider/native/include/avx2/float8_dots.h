// Products of a few rows with a panel of 8-bit floats, by AVX2: in float32, by way of half precision.
#pragma once

#include "products/float8_pass.h"
#include "dot_steps.h"

namespace outrider {

// Adds a group's products with V vectors of eight outputs, from `first` on.
template <int M, int V>
[[gnu::noinline]] void run_float8(const Pass& pass, const Float8Group& group, int first, float* sums) {
  constexpr int64_t kChunks = 4, kSteps = kGroup / kChunks / 2;  // of two k, of a chunk of rows
  const __m256i kept = _mm256_set1_epi16(int16_t(0xBF80));
  auto widen = [&](__m256i bits, __m256* to) INLINED {  // the upper bytes
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(bits, 1), kept);
    to[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    to[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  };
  auto step = [&](__m256 sum[M][V], const __m256 w[V], const char* x) INLINED {
    each<M>([&](auto m) INLINED {
      const __m256 all = broadcast(x + m * bytes_of_chunk(Format::kFloat8));
      each<V>([&](auto v) INLINED { add_product(sum[m][v], w[v], all); });
    });
  };
  __m256 sum[M][V];
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED {
      sum[m][v] = group.fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(sums + m * kPanel + (first + v) * kEight);
    });
  });
  const char* from = group.values + first * kEight * 2;
  int64_t line = 2 * group.line;  // of 64 bytes
  for (int64_t chunk = kChunks * group.index; chunk < kChunks * (group.index + 1); ++chunk) {
    const char* x = pass.chunk(chunk);
#pragma GCC unroll 1
    for (int64_t i = 0; i < kSteps; ++i, ++line, from += 2 * kPanel, x += 8) {
      if (V * kEight == kPanel) {
        if (line % 2 == 0) pass.fetch(line / 2);
      } else if (line % 2 == first / V) {
        pass.fetch_half(line / 2, first / V);
      }
      __m256 w[V];
      each<V / 2>([&](auto v) INLINED { widen(_mm256_slli_epi16(load_vector(from + v * 32), 8), w + 2 * v); });
      step(sum, w, x);
      const char* again = once_more(from);
      each<V / 2>([&](auto v) INLINED { widen(load_vector(again + v * 32), w + 2 * v); });
      step(sum, w, x + 4);
    }
  }
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { _mm256_storeu_ps(sums + m * kPanel + (first + v) * kEight, sum[m][v]); });
  });
}

template <int M>
void multiply_float8(const Pass& pass) {
  constexpr int V = M <= 2 ? 4 : 2;
  each_float8_group<M>(pass, [&](const Float8Group& group, float* sums) {
    for (int first = 0; first < kPanel / kEight; first += V) run_float8<M, V>(pass, group, first, sums);
  });
}

}  // namespace outrider
