// Keys of the cache in registers: turned, so that a vector holds one number of 16 keys, and multiplied with queries.
#pragma once

#include <type_traits>

#include "eight.h"
#include "simd.h"

namespace outrider {

// 16 x 16 numbers of 32 bits.
inline void transpose16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // r[i], r[4+i], r[8+i], r[12+i]: 128-bit lanes hold columns i, 4+i, 8+i, 12+i
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

// bfloat16, multiplied on the matrix unit.
struct MatrixBF16 {
  uint16_t bits;
};
template <class T>
constexpr bool kOnMatrixUnit = std::is_same_v<T, MatrixBF16>;

// How keys are multiplied: float32 number by number, bfloat16 in pairs with queries rounded to bfloat16, too.
template <class T>
struct Dot {
  using Number = std::conditional_t<std::is_same_v<T, float>, float, BF16>;
  static constexpr int kStep = 4 / int(sizeof(T));  // numbers of a key in 32 bits
  static __m512 add(__m512 sum, __m512i keys, int32_t query) {
    if constexpr (std::is_same_v<T, float>) {
      return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(query)), _mm512_castsi512_ps(keys), sum);
    } else {
      return _mm512_dpbf16_ps(sum, __m512bh(keys), __m512bh(_mm512_set1_epi32(query)));
    }
  }
  // The next `count` numbers of a key, which may be stored in a narrower format, as 16 words.
  template <class P>
  static __m512i load_words(const P* from, int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      return _mm512_castps_si512(load(from, lanes(count)));
    } else if constexpr (std::is_same_v<P, BF16>) {
      if (count >= 32) return _mm512_loadu_si512(from);
      return _mm512_maskz_loadu_epi16((__mmask32(1) << count) - 1, from);
    } else {
      const __m512 low = load(from, lanes(count)), high = load(from + kLanes, lanes(count - kLanes));
      return __m512i(_mm512_cvtne2ps_pbh(high, low));
    }
  }
};

}  // namespace outrider
