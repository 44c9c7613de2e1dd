// Products of a few rows with a panel of 8-bit floats, by NEON: by dot products of bfloat16, or, without these, in float32 by
// way of half precision.
#pragma once

#include "products/float8_pass.h"
#include "dot_steps.h"
#include "float8_lines.h"

namespace outrider {

// Sums of V vectors of four outputs, from `first` on; fresh ones are 0.
template <int M, int V>
INLINED inline void take_sums(float32x4_t (&sum)[M][V], const float* sums, int first, bool fresh) {
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { sum[m][v] = fresh ? vdupq_n_f32(0.0f) : vld1q_f32(sums + m * kPanel + (first + v) * kFour); });
  });
}

template <int M, int V>
INLINED inline void put_sums(const float32x4_t (&sum)[M][V], float* sums, int first) {
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { vst1q_f32(sums + m * kPanel + (first + v) * kFour, sum[m][v]); });
  });
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

// Adds a group's products with V vectors of four outputs, from `first` on.
template <int M, int V>
[[gnu::noinline]] void run_float8(const Pass& pass, const Float8Group& group, int first, float* sums) {
  constexpr int64_t kChunks = 2, kSteps = kGroup / kChunks / 2;  // of two k, of a chunk of rows
  const Float8Lines lines;
  float32x4_t sum[M][V];
  take_sums(sum, sums, first, group.fresh);
  const char* from = group.values + first * kFour * 2;
  int64_t line = group.line;
  for (int64_t chunk = kChunks * group.index; chunk < kChunks * (group.index + 1); ++chunk) {
    const char* x = pass.chunk(chunk);
#pragma GCC unroll 1
    for (int64_t i = 0; i < kSteps; i += kWords, x += 16) {
      const Words<M> words(x);
      each<kWords>([&](auto lane) INLINED {
        if constexpr (V * kFour == kPanel) {
          if constexpr (lane % 2 == 0) pass.fetch(line++);
        } else {
          if constexpr (lane % 2 == 0) pass.fetch_half(line++, first / V);
        }
        each<V / 2>([&](auto half) INLINED {
          uint8x16_t w[2];
          lines.load(from + half * 16, w[0], w[1]);
          each<M>([&](auto m) INLINED {
            each<2>([&](auto i) INLINED {
              sum[m][2 * half + i] = vbfdotq_laneq_f32(sum[m][2 * half + i], vreinterpretq_bf16_u8(w[i]),
                                                       vreinterpretq_bf16_u8(words.row[m]), lane);
            });
          });
        });
        from += 2 * kPanel;
      });
    }
  }
  put_sums(sum, sums, first);
}

#else

template <int M, int V>
[[gnu::noinline]] void run_float8(const Pass& pass, const Float8Group& group, int first, float* sums) {
  constexpr int64_t kChunks = 4, kSteps = kGroup / kChunks / 2;  // of two k, of a chunk of rows
  float32x4_t sum[M][V];
  take_sums(sum, sums, first, group.fresh);
  const char* from = group.values + first * kFour * 2;
  int64_t line = group.line;
  for (int64_t chunk = kChunks * group.index; chunk < kChunks * (group.index + 1); ++chunk) {
    const char* x = pass.chunk(chunk);
#pragma GCC unroll 1
    for (int64_t i = 0; i < kSteps; i += 2, x += 16, ++line) {
      if constexpr (V * kFour == kPanel) pass.fetch(line);
      else pass.fetch_half(line, first / V);
      const Words<M> words(x);
      each<2>([&](auto step) INLINED {
        each<V / 2>([&](auto half) INLINED {
          const int16x8_t bits = vreinterpretq_s16_u8(load_vector(from + half * 16));
          each<2>([&](auto odd) INLINED {  // k, in the upper bytes
            const int16x8_t upper = vshrq_n_s16(odd ? bits : vshlq_n_s16(bits, 8), 1);
            const float16x8_t halves = vreinterpretq_f16_s16(vandq_s16(upper, vdupq_n_s16(int16_t(0xBF80))));
            const float32x4_t w[2] = {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
            each<M>([&](auto m) INLINED {
              each<2>([&](auto i) INLINED { add_product<2 * step + odd>(sum[m][2 * half + i], w[i], words.row[m]); });
            });
          });
        });
        from += 2 * kPanel;
      });
    }
  }
  put_sums(sum, sums, first);
}

#endif

template <int M>
void multiply_float8(const Pass& pass) {
  constexpr int V = M <= 3 ? 8 : 4;
  each_float8_group<M>(pass, [&](const Float8Group& group, float* sums) {
    for (int first = 0; first < kPanel / kFour; first += V) run_float8<M, V>(pass, group, first, sums);
  });
}

}  // namespace outrider
