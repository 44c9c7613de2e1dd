// Dot products of bfloat16 pairs, with queries rounded to bfloat16 where the processor multiplies bfloat16. Elsewhere both
// numbers of a word are widened and multiplied in float32 with float32 queries. Included by kv_dot.h.
#pragma once

#include "kv_dot.h"

namespace outrider {

// Words of bfloat16 pairs, for both.
struct Pairs {
  static constexpr int kStep = 2;

  // 32 numbers in a row.
  static Ints pack(Floats low, Floats high) {
    const Shorts first = narrow(low), second = narrow(high);
    auto words = [](uint16x8_t x) { return vreinterpretq_s32_u16(x); };
    return {words(first.low), words(first.high), words(second.low), words(second.high)};
  }
  template <class P>
  static Ints load_words(const P* from, int64_t count) {
    if constexpr (std::is_same_v<P, BF16>) {
      if (count >= 2 * kLanes) return load_ints(from);
      alignas(16) BF16 some[2 * kLanes] = {};
      if (count > 0) std::memcpy(some, from, size_t(count) * sizeof(BF16));
      return load_ints(some);
    } else {  // fp8, which bfloat16 represents exactly
      return pack(load(from, lanes(count)), load(from + kLanes, lanes(count - kLanes)));
    }
  }

  static void interleave(Ints x, Ints y, Ints& first, Ints& second) {
    auto low = [](int32x4_t p, int32x4_t q) {
      return vreinterpretq_s32_s16(vzip1q_s16(vreinterpretq_s16_s32(p), vreinterpretq_s16_s32(q)));
    };
    auto high = [](int32x4_t p, int32x4_t q) {
      return vreinterpretq_s32_s16(vzip2q_s16(vreinterpretq_s16_s32(p), vreinterpretq_s16_s32(q)));
    };
    first = {low(x.a, y.a), high(x.a, y.a), low(x.b, y.b), high(x.b, y.b)};
    second = {low(x.c, y.c), high(x.c, y.c), low(x.d, y.d), high(x.d, y.d)};
  }
  static void put_in_order(Floats*) {}  // they are
};

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

template <>
struct Dot<BF16> : Pairs {
  using Number = BF16;
  static constexpr int kQuery = 1;
  static Floats add(Floats sum, Ints keys, Ints queries) {
    return map<Floats>([](float32x4_t before, int32x4_t p, int32x4_t q) {
      return vbfdotq_f32(before, vreinterpretq_bf16_s32(p), vreinterpretq_bf16_s32(q));
    }, sum, keys, queries);
  }
  static Floats add(Floats sum, Ints keys, const int32_t* query) { return add(sum, keys, ints(*query)); }
  static void store_weights(int32_t* to, Floats low, Floats high) { store(to, pack(low, high)); }
};

#else

template <>
struct Dot<BF16> : Pairs {
  using Number = float;
  static constexpr int kQuery = 2;
  static Floats add(Floats sum, Ints keys, const int32_t* query) {
    sum = fmadd(first(keys), as_floats(ints(query[0])), sum);
    return fmadd(second(keys), as_floats(ints(query[1])), sum);
  }
  static Floats add(Floats sum, Ints x, Ints y) { return fmadd(second(x), second(y), fmadd(first(x), first(y), sum)); }
  static void store_weights(int32_t* to, Floats low, Floats high) {
    store(to, as_ints(low));
    store(to + kLanes, as_ints(high));
  }

 private:
  static Floats first(Ints words) { return as_floats(shift_left<16>(words)); }
  static Floats second(Ints words) { return as_floats(bit_and(words, ints(int32_t(0xFFFF0000)))); }
};

#endif

}  // namespace outrider
