// Steps of products of a few rows with a panel, by NEON. dots.h and block_dots.h have the products.
//
// An instruction multiplies a vector of weights with one word of a row: a float32, a pair of bfloat16, or four 8-bit numbers.
// Without i8mm, which multiplies unsigned with signed bytes, weights of 8 bits become signed first; without bf16, bfloat16
// weights are widened and rows are float32.
#pragma once

#include <type_traits>
#include <utility>

#include "panel_pass.h"

namespace outrider {

constexpr int kDotRows = 6;  // rows of one pass over a panel

constexpr int kFour = 4;        // outputs of a vector
constexpr int64_t kLine = 128;  // bytes of a panel for a step of k

inline uint8x16_t load_vector(const char* from) { return vld1q_u8(reinterpret_cast<const uint8_t*>(from)); }

// f(0), f(1), ... with constants, so that what they index lies in registers, and lanes are constants.
#define INLINED __attribute__((always_inline))
template <class F, int... I>
[[gnu::always_inline]] inline void each_of(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
[[gnu::always_inline]] inline void each(F&& f) {
  each_of(std::make_integer_sequence<int, N>(), f);
}

constexpr int kWords = 4;  // of a row in a register: that many lines at a time

// Four words of each row; those of the others follow chunk by chunk.
template <int M>
struct Words {
  uint8x16_t row[M];

  INLINED explicit Words(const char* x) {
    each<M>([&](auto m) INLINED { row[m] = load_vector(x + m * bytes_of_chunk(Format::kFloat32)); });
  }
};

// sum += a line's weights times the rows' words LANE.
template <int LANE>
INLINED inline void add_product(float32x4_t& sum, float32x4_t w, uint8x16_t x) {
  sum = vfmaq_laneq_f32(sum, w, vreinterpretq_f32_u8(x), LANE);
}
template <int LANE>
INLINED inline void add_fours(int32x4_t& sum, uint8x16_t w, uint8x16_t x) {  // of weights below 128
  sum = vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(x), LANE);
}

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool kMultipliesUnsigned = true;
#else
constexpr bool kMultipliesUnsigned = false;
#endif

// sum += a vector of value + 128 times words of the rows; without i8mm of the values themselves.
template <int LANE>
INLINED inline void add_biased(int32x4_t& sum, uint8x16_t w, uint8x16_t x) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  sum = vusdotq_laneq_s32(sum, w, vreinterpretq_s8_u8(x), LANE);
#else
  add_fours<LANE>(sum, w, x);
#endif
}

}  // namespace outrider
