// Dot products of bfloat16 pairs, with queries rounded to bfloat16 as well. Included by kv_dot.h.
#pragma once

#include "kv_dot.h"

namespace outrider {

template <>
struct Dot<BF16> {
  using Number = BF16;
  static constexpr int kStep = 2, kQuery = 1;
  static Floats add(Floats sum, Ints keys, Ints queries) {
    return _mm512_dpbf16_ps(sum, __m512bh(keys), __m512bh(queries));
  }
  static Floats add(Floats sum, Ints keys, const int32_t* query) { return add(sum, keys, ints(*query)); }
  template <class P>
  static Ints load_words(const P* from, int64_t count) {
    if constexpr (std::is_same_v<P, BF16>) {
      if (count >= 32) return load_ints(from);
      return _mm512_maskz_loadu_epi16((__mmask32(1) << count) - 1, from);
    } else {
      return pack(load(from, lanes(count)), load(from + kLanes, lanes(count - kLanes)));
    }
  }
  // 32 numbers in a row.
  static Ints pack(Floats low, Floats high) { return Ints(_mm512_cvtne2ps_pbh(high, low)); }
  static void store_weights(int32_t* to, Floats low, Floats high) { store(to, pack(low, high)); }

  static void interleave(Ints a, Ints b, Ints& first, Ints& second) {
    first = _mm512_unpacklo_epi16(a, b);
    second = _mm512_unpackhi_epi16(a, b);
  }
  static void put_in_order(Floats* sum) {
    const Ints first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const Ints second = outrider::add(first, ints(8));
    const Floats low = _mm512_permutex2var_ps(sum[0], first, sum[1]);
    sum[1] = _mm512_permutex2var_ps(sum[0], second, sum[1]);
    sum[0] = low;
  }
};

template <>
struct Dot<MatrixBF16> : Dot<BF16> {};

}  // namespace outrider
