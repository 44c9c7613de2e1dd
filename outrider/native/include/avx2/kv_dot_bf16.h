// Dot products of bfloat16 pairs. AVX2 has no instruction for them: both numbers of a word are widened, one instruction each,
// and multiplied in float32 with float32 queries. Included by kv_dot.h.
#pragma once

#include "kv_dot.h"

namespace outrider {

template <>
struct Dot<BF16> {
  using Number = float;
  static constexpr int kStep = 2, kQuery = 2;
  static Floats add(Floats sum, Ints keys, const int32_t* query) {
    sum = fmadd(first(keys), as_floats(ints(query[0])), sum);
    return fmadd(second(keys), as_floats(ints(query[1])), sum);
  }
  static Floats add(Floats sum, Ints a, Ints b) { return fmadd(second(a), second(b), fmadd(first(a), first(b), sum)); }
  template <class P>
  static Ints load_words(const P* from, int64_t count) {
    if constexpr (std::is_same_v<P, BF16>) {
      if (count >= 2 * kLanes) return load_ints(from);
      alignas(32) BF16 some[2 * kLanes] = {};
      std::memcpy(some, from, size_t(count) * sizeof(BF16));
      return load_ints(some);
    } else {  // fp8, which bfloat16 represents exactly
      return {narrow(load(from, lanes(count))), narrow(load(from + kLanes, lanes(count - kLanes)))};
    }
  }
  static void store_weights(int32_t* to, Floats low, Floats high) {
    store(to, as_ints(low));
    store(to + kLanes, as_ints(high));
  }

  static void interleave(Ints a, Ints b, Ints& first, Ints& second) {
    first = {_mm256_unpacklo_epi16(a.low, b.low), _mm256_unpackhi_epi16(a.low, b.low)};
    second = {_mm256_unpacklo_epi16(a.high, b.high), _mm256_unpackhi_epi16(a.high, b.high)};
  }
  static void put_in_order(Floats* sum) {
    for (int i = 0; i < 2; ++i) {
      const __m256 low = sum[i].low, high = sum[i].high;
      sum[i] = {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
    }
  }

 private:
  static Floats first(Ints words) { return as_floats(shift_left<16>(words)); }
  static Floats second(Ints words) { return as_floats(bit_and(words, ints(int32_t(0xFFFF0000)))); }
};

}  // namespace outrider
