// Vectors of 16 numbers, by NEON, four registers each; avx512/lanes.h documents the functions.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace outrider {

constexpr int kLanes = 16;
constexpr int kSums = 6;  // vectors of sums in 32 registers, four a vector, next to the operands

struct Floats {
  float32x4_t a, b, c, d;
};
struct Ints {
  int32x4_t a, b, c, d;
};
struct Shorts {  // 16 numbers of 16 bits
  uint16x8_t low, high;
};
using Mask = uint16_t;
constexpr Mask kAllLanes = 0xFFFF;

struct BF16 {
  uint16_t bits;
};

// f of each register of some vectors.
template <class To, class F, class... Vectors>
[[gnu::always_inline]] inline To map(F f, const Vectors&... x) {
  return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

// Lanes of 32 ones for a mask's bits, of the four lanes from FIRST on.
template <int FIRST>
uint32x4_t lanes_of(Mask mask) {
  static constexpr uint32_t kBits[4] = {1u << FIRST, 2u << FIRST, 4u << FIRST, 8u << FIRST};
  return vtstq_u32(vdupq_n_u32(mask), vld1q_u32(kBits));
}
inline Mask mask_of(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  static constexpr uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
  const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(c), vreinterpretq_u16_u32(d));
  const uint8x16_t all = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
  const uint8x16_t bits = vandq_u8(all, vld1q_u8(kBits));
  return Mask(vaddv_u8(vget_low_u8(bits)) | vaddv_u8(vget_high_u8(bits)) << 8);
}

// --- the same number in all lanes ---

inline Floats floats(float value = 0.0f) {
  const float32x4_t four = vdupq_n_f32(value);
  return {four, four, four, four};
}
inline Ints ints(int32_t value = 0) {
  const int32x4_t four = vdupq_n_s32(value);
  return {four, four, four, four};
}
inline Ints first_ints() {
  static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {vld1q_s32(kNumbers), vld1q_s32(kNumbers + 4), vld1q_s32(kNumbers + 8), vld1q_s32(kNumbers + 12)};
}

inline Ints as_ints(Floats x) {
  return map<Ints>([](float32x4_t v) { return vreinterpretq_s32_f32(v); }, x);
}
inline Floats as_floats(Ints x) {
  return map<Floats>([](int32x4_t v) { return vreinterpretq_f32_s32(v); }, x);
}

inline Ints select(Mask mask, Ints there, Ints otherwise) {
  return {vbslq_s32(lanes_of<0>(mask), there.a, otherwise.a), vbslq_s32(lanes_of<4>(mask), there.b, otherwise.b),
          vbslq_s32(lanes_of<8>(mask), there.c, otherwise.c), vbslq_s32(lanes_of<12>(mask), there.d, otherwise.d)};
}
inline Floats select(Mask mask, Floats there, Floats otherwise) {
  return as_floats(select(mask, as_ints(there), as_ints(otherwise)));
}

// --- from memory and back ---

// There are no masked instructions: numbers whose bits are set are copied. BYTES: of a number
template <int BYTES>
void copy_some(void* to, const void* from, Mask mask) {
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int at = __builtin_ctz(rest) * BYTES;
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, BYTES);
  }
}

inline Ints load_ints(const void* from) {
  const auto* at = static_cast<const int32_t*>(from);
  return {vld1q_s32(at), vld1q_s32(at + 4), vld1q_s32(at + 8), vld1q_s32(at + 12)};
}
inline Ints load_ints(const void* from, Mask mask) {
  if (mask == kAllLanes) return load_ints(from);
  alignas(16) int32_t some[kLanes] = {};
  copy_some<4>(some, from, mask);
  return load_ints(some);
}
inline Floats load(const float* from) {
  return {vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
inline Floats load(const float* from, Mask mask) { return as_floats(load_ints(from, mask)); }
inline Floats load(const float* from, Mask mask, Floats otherwise) { return select(mask, load(from, mask), otherwise); }

inline void store(int32_t* to, Ints value) {
  vst1q_s32(to, value.a), vst1q_s32(to + 4, value.b), vst1q_s32(to + 8, value.c), vst1q_s32(to + 12, value.d);
}
inline void store(float* to, Floats value) {
  vst1q_f32(to, value.a), vst1q_f32(to + 4, value.b), vst1q_f32(to + 8, value.c), vst1q_f32(to + 12, value.d);
}
inline void store(float* to, Floats value, Mask mask) {
  if (mask == kAllLanes) return store(to, value);
  alignas(16) float all[kLanes];
  store(all, value);
  copy_some<4>(to, all, mask);
}

inline uint8x16_t load_bytes_of(const void* from, Mask mask) {
  if (mask == kAllLanes) return vld1q_u8(static_cast<const uint8_t*>(from));
  alignas(16) uint8_t some[kLanes] = {};
  copy_some<1>(some, from, mask);
  return vld1q_u8(some);
}
inline Ints load_bytes(const char* from, Mask mask) {
  const int8x16_t bytes = vreinterpretq_s8_u8(load_bytes_of(from, mask));
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
inline Shorts load_shorts(const void* from, Mask mask) {
  const uint8x16_t bytes = load_bytes_of(from, mask);
  return {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
}

// The low halves of all lanes.
inline Shorts shorts_of(Ints value) {
  auto halves = [](int32x4_t x) { return vreinterpretq_u16_s32(x); };
  return {vuzp1q_u16(halves(value.a), halves(value.b)), vuzp1q_u16(halves(value.c), halves(value.d))};
}
inline void store_bytes(void* to, Ints value) {
  const Shorts low = shorts_of(value);
  vst1q_u8(static_cast<uint8_t*>(to), vuzp1q_u8(vreinterpretq_u8_u16(low.low), vreinterpretq_u8_u16(low.high)));
}
inline void store_bytes(void* to, Ints value, Mask mask) {
  if (mask == kAllLanes) return store_bytes(to, value);
  alignas(16) char all[kLanes];
  store_bytes(all, value);
  copy_some<1>(to, all, mask);
}
template <class Number, class Vector>
void keep_some(Number* to, Vector value, Mask mask) {
  alignas(16) Number all[kLanes];
  store(all, value);
  for (unsigned rest = mask; rest; rest &= rest - 1) *to++ = all[__builtin_ctz(rest)];
}
inline void store_kept(float* to, Floats value, Mask mask) { keep_some(to, value, mask); }
inline void store_kept(int32_t* to, Ints value, Mask mask) { keep_some(to, value, mask); }

inline Floats widen(Shorts bits) {
  auto wide = [](uint16x4_t four) { return vreinterpretq_f32_u32(vshll_n_u16(four, 16)); };
  return {wide(vget_low_u16(bits.low)), wide(vget_high_u16(bits.low)), wide(vget_low_u16(bits.high)),
          wide(vget_high_u16(bits.high))};
}
// Rounds to nearest, ties to even; NaN stays NaN.
inline Shorts narrow(Floats value) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  auto eight = [](float32x4_t low, float32x4_t high) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
  };
  return {eight(value.a, value.b), eight(value.c, value.d)};
#else
  return shorts_of(map<Ints>([](float32x4_t wide) {
    const uint32x4_t bits = vreinterpretq_u32_f32(wide), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    return vreinterpretq_s32_u32(vshrq_n_u32(vbslq_u32(vceqq_f32(wide, wide), sum, quiet), 16));
  }, value));
#endif
}
inline Floats load(const BF16* from) {
  const auto* at = reinterpret_cast<const uint16_t*>(from);
  return widen(Shorts{vld1q_u16(at), vld1q_u16(at + 8)});
}
inline Floats load(const BF16* from, Mask mask) {
  if (mask == kAllLanes) return load(from);
  alignas(16) BF16 some[kLanes] = {};
  copy_some<2>(some, from, mask);
  return load(some);
}
inline void store(BF16* to, Floats value) {
  const Shorts bits = narrow(value);
  auto* at = reinterpret_cast<uint16_t*>(to);
  vst1q_u16(at, bits.low), vst1q_u16(at + 8, bits.high);
}
inline void store(BF16* to, Floats value, Mask mask) {
  if (mask == kAllLanes) return store(to, value);
  alignas(16) BF16 all[kLanes];
  store(all, value);
  copy_some<2>(to, all, mask);
}
inline Floats from_halves(Shorts bits) {
  const float16x8_t low = vreinterpretq_f16_u16(bits.low), high = vreinterpretq_f16_u16(bits.high);
  return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)), vcvt_high_f32_f16(high)};
}

// --- float32 ---

inline Floats add(Floats x, Floats y) {
  return map<Floats>([](float32x4_t p, float32x4_t q) { return vaddq_f32(p, q); }, x, y);
}
inline Floats sub(Floats x, Floats y) {
  return map<Floats>([](float32x4_t p, float32x4_t q) { return vsubq_f32(p, q); }, x, y);
}
inline Floats mul(Floats x, Floats y) {
  return map<Floats>([](float32x4_t p, float32x4_t q) { return vmulq_f32(p, q); }, x, y);
}
inline Floats div(Floats x, Floats y) {
  return map<Floats>([](float32x4_t p, float32x4_t q) { return vdivq_f32(p, q); }, x, y);
}
inline Floats fmadd(Floats x, Floats y, Floats z) {
  return map<Floats>([](float32x4_t p, float32x4_t q, float32x4_t r) { return vfmaq_f32(r, p, q); }, x, y, z);
}
inline Floats fmsub(Floats x, Floats y, Floats z) {
  return map<Floats>([](float32x4_t p, float32x4_t q, float32x4_t r) { return vfmaq_f32(vnegq_f32(r), p, q); }, x, y, z);
}
inline Floats fnmadd(Floats x, Floats y, Floats z) {
  return map<Floats>([](float32x4_t p, float32x4_t q, float32x4_t r) { return vfmsq_f32(r, p, q); }, x, y, z);
}
// The second number where one is not a number, as on x86; fmin and fmax of ARM would return NaN.
inline float32x4_t min4(float32x4_t p, float32x4_t q) { return vbslq_f32(vcltq_f32(p, q), p, q); }
inline float32x4_t max4(float32x4_t p, float32x4_t q) { return vbslq_f32(vcgtq_f32(p, q), p, q); }
inline Floats min(Floats x, Floats y) { return map<Floats>(min4, x, y); }
inline Floats max(Floats x, Floats y) { return map<Floats>(max4, x, y); }
inline Floats abs(Floats x) {
  return map<Floats>([](float32x4_t p) { return vabsq_f32(p); }, x);
}
inline Floats round_to_integer(Floats x) {
  return map<Floats>([](float32x4_t p) { return vrndnq_f32(p); }, x);
}
// n: -126 .. 127 where the mask is.
inline Floats scaled_where(Mask mask, Floats x, Floats n) {
  const Floats scaled = map<Floats>([](float32x4_t p, float32x4_t exponent) {
    const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(exponent), vdupq_n_s32(127));
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
  }, x, n);
  return mask == kAllLanes ? scaled : select(mask, scaled, floats());
}
inline Floats mantissa_of(Floats x) {
  return map<Floats>([](float32x4_t p) {
    const uint32x4_t fraction = vandq_u32(vreinterpretq_u32_f32(p), vdupq_n_u32(0x007FFFFF));
    return vreinterpretq_f32_u32(vorrq_u32(fraction, vdupq_n_u32(0x3F000000)));
  }, x);
}
inline Floats exponent_of(Floats x) {
  return map<Floats>([](float32x4_t p) {
    const int32x4_t biased = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_f32(p), 23));
    return vcvtq_f32_s32(vsubq_s32(biased, vdupq_n_s32(126)));
  }, x);
}
// Adds the halves in the order of AVX-512's reduction.
inline float sum_of(Floats x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest_of(Floats x) {
  float four[4];
  vst1q_f32(four, max4(max4(x.a, x.c), max4(x.b, x.d)));
  auto larger = [](float p, float q) { return p > q ? p : q; };
  return larger(larger(four[0], four[2]), larger(four[1], four[3]));
}

template <class F>
[[gnu::always_inline]] inline Mask compare(F f, Floats x, Floats y) {
  return mask_of(f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d));
}
inline Mask greater(Floats x, Floats y) {
  return compare([](float32x4_t p, float32x4_t q) { return vcgtq_f32(p, q); }, x, y);
}
inline Mask greater_equal(Floats x, Floats y) {
  return compare([](float32x4_t p, float32x4_t q) { return vcgeq_f32(p, q); }, x, y);
}
inline Mask less(Floats x, Floats y) { return greater(y, x); }
inline Mask less_equal(Floats x, Floats y) { return greater_equal(y, x); }
inline Mask equal(Floats x, Floats y) {
  return compare([](float32x4_t p, float32x4_t q) { return vceqq_f32(p, q); }, x, y);
}
inline Mask unordered(Floats x, Floats y) {
  return Mask(~compare([](float32x4_t p, float32x4_t q) { return vandq_u32(vceqq_f32(p, p), vceqq_f32(q, q)); }, x, y));
}

// --- integers of 32 bits ---

inline Ints add(Ints x, Ints y) {
  return map<Ints>([](int32x4_t p, int32x4_t q) { return vaddq_s32(p, q); }, x, y);
}
inline Ints sub(Ints x, Ints y) {
  return map<Ints>([](int32x4_t p, int32x4_t q) { return vsubq_s32(p, q); }, x, y);
}
inline Ints mul(Ints x, Ints y) {
  return map<Ints>([](int32x4_t p, int32x4_t q) { return vmulq_s32(p, q); }, x, y);
}
inline Ints bit_and(Ints x, Ints y) {
  return map<Ints>([](int32x4_t p, int32x4_t q) { return vandq_s32(p, q); }, x, y);
}
inline Ints bit_or(Ints x, Ints y) {
  return map<Ints>([](int32x4_t p, int32x4_t q) { return vorrq_s32(p, q); }, x, y);
}
inline Ints bit_xor(Ints x, Ints y) {
  return map<Ints>([](int32x4_t p, int32x4_t q) { return veorq_s32(p, q); }, x, y);
}
template <int N>
Ints shift_left(Ints x) {
  return map<Ints>([](int32x4_t p) { return vshlq_n_s32(p, N); }, x);
}
template <int N>
Ints shift_right(Ints x) {
  return map<Ints>([](int32x4_t p) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(p), N)); }, x);
}
inline Mask less(Ints x, Ints y) {
  return mask_of(vcltq_s32(x.a, y.a), vcltq_s32(x.b, y.b), vcltq_s32(x.c, y.c), vcltq_s32(x.d, y.d));
}
inline Mask equal(Ints x, Ints y) {
  return mask_of(vceqq_s32(x.a, y.a), vceqq_s32(x.b, y.b), vceqq_s32(x.c, y.c), vceqq_s32(x.d, y.d));
}
inline int32_t sum_of(Ints x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.c), vaddq_s32(x.b, x.d))); }

inline Floats to_floats(Ints x) {
  return map<Floats>([](int32x4_t p) { return vcvtq_f32_s32(p); }, x);
}
inline Floats to_floats_unsigned(Ints x) {
  return map<Floats>([](int32x4_t p) { return vcvtq_f32_u32(vreinterpretq_u32_s32(p)); }, x);
}
inline Ints rounded(Floats x) {
  return map<Ints>([](float32x4_t p) { return vcvtnq_s32_f32(p); }, x);
}

// --- integers of 16 bits ---

inline Shorts shorts(int16_t value) {
  const uint16x8_t eight = vdupq_n_u16(uint16_t(value));
  return {eight, eight};
}
inline Shorts bit_and(Shorts x, Shorts y) { return {vandq_u16(x.low, y.low), vandq_u16(x.high, y.high)}; }
inline Shorts bit_or(Shorts x, Shorts y) { return {vorrq_u16(x.low, y.low), vorrq_u16(x.high, y.high)}; }
template <int N>
Shorts shift_left(Shorts x) {
  return {vshlq_n_u16(x.low, N), vshlq_n_u16(x.high, N)};
}
inline Shorts select_equal(Shorts x, Shorts y, Shorts there, Shorts otherwise) {
  return {vbslq_u16(vceqq_u16(x.low, y.low), there.low, otherwise.low),
          vbslq_u16(vceqq_u16(x.high, y.high), there.high, otherwise.high)};
}

// 4 x 4 words.
inline void transpose4(int32x4_t& p, int32x4_t& q, int32x4_t& r, int32x4_t& s) {
  auto pair = [](int32x4_t x) { return vreinterpretq_s64_s32(x); };
  auto words = [](int64x2_t x) { return vreinterpretq_s32_s64(x); };
  const int64x2_t even = pair(vtrn1q_s32(p, q)), odd = pair(vtrn2q_s32(p, q));
  const int64x2_t last_even = pair(vtrn1q_s32(r, s)), last_odd = pair(vtrn2q_s32(r, s));
  p = words(vtrn1q_s64(even, last_even)), q = words(vtrn1q_s64(odd, last_odd));
  r = words(vtrn2q_s64(even, last_even)), s = words(vtrn2q_s64(odd, last_odd));
}

// 16 x 16 words: blocks of 4 x 4, each in the place of its mirror image.
inline void transpose16(Ints* r) {
  constexpr int32x4_t Ints::*kParts[4] = {&Ints::a, &Ints::b, &Ints::c, &Ints::d};
  Ints t[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      int32x4_t part[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) part[n] = r[4 * i + n].*kParts[j];
      transpose4(part[0], part[1], part[2], part[3]);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) t[4 * j + n].*kParts[i] = part[n];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) r[i] = t[i];
}

}  // namespace outrider
