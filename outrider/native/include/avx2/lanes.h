// Vectors of 16 numbers, by AVX2; avx512/lanes.h documents the functions.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "processor.h"

namespace outrider {

constexpr int kLanes = 16;
constexpr int kSums = 6;  // vectors of sums in 16 registers, two a vector, next to the operands

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
using Mask = uint16_t;
constexpr Mask kAllLanes = 0xFFFF;

struct BF16 {
  uint16_t bits;
};

// Lanes of 32 ones for a mask's bits, of the lanes from FIRST on.
template <int FIRST>
__m256i lanes_of(Mask mask) {
  const __m256i bits = _mm256_slli_epi32(_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), FIRST);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), bits), bits);
}
inline Mask mask_of(__m256 low, __m256 high) { return Mask(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8); }

// --- the same number in all lanes ---

inline Floats floats(float value = 0.0f) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Ints ints(int32_t value = 0) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Ints first_ints() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

inline Ints as_ints(Floats a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
inline Floats as_floats(Ints a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }

inline Ints select(Mask mask, Ints there, Ints otherwise) {
  return {_mm256_blendv_epi8(otherwise.low, there.low, lanes_of<0>(mask)),
          _mm256_blendv_epi8(otherwise.high, there.high, lanes_of<8>(mask))};
}
inline Floats select(Mask mask, Floats there, Floats otherwise) {
  return as_floats(select(mask, as_ints(there), as_ints(otherwise)));
}

// --- from memory and back ---

inline Ints load_ints(const void* from) {
  const auto* at = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Ints load_ints(const void* from, Mask mask) {
  if (mask == kAllLanes) return load_ints(from);
  const auto* at = static_cast<const int*>(from);
  return {_mm256_maskload_epi32(at, lanes_of<0>(mask)), _mm256_maskload_epi32(at + 8, lanes_of<8>(mask))};
}
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Floats load(const float* from, Mask mask) { return as_floats(load_ints(from, mask)); }
inline Floats load(const float* from, Mask mask, Floats otherwise) { return select(mask, load(from, mask), otherwise); }

inline void store(int32_t* to, Ints value) {
  auto* at = reinterpret_cast<__m256i*>(to);
  _mm256_storeu_si256(at, value.low);
  _mm256_storeu_si256(at + 1, value.high);
}
inline void store(float* to, Floats value) {
  _mm256_storeu_ps(to, value.low);
  _mm256_storeu_ps(to + 8, value.high);
}
inline void store(float* to, Floats value, Mask mask) {
  if (mask == kAllLanes) return store(to, value);
  _mm256_maskstore_ps(to, lanes_of<0>(mask), value.low);
  _mm256_maskstore_ps(to + 8, lanes_of<8>(mask), value.high);
}

// Numbers of fewer than 32 bits have no masked instructions: those whose bits are set are copied. BYTES: of a number
template <int BYTES>
void copy_some(void* to, const void* from, Mask mask) {
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int at = __builtin_ctz(rest) * BYTES;
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, BYTES);
  }
}
inline __m128i load_bytes_of(const void* from, Mask mask) {
  if (mask == kAllLanes) return _mm_loadu_si128(static_cast<const __m128i*>(from));
  alignas(16) char some[16] = {};
  copy_some<1>(some, from, mask);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(some));
}
inline Ints load_bytes(const char* from, Mask mask) {
  const __m128i bytes = load_bytes_of(from, mask);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
inline Shorts load_shorts(const void* from, Mask mask) { return _mm256_cvtepu8_epi16(load_bytes_of(from, mask)); }

// The low bytes of all lanes.
inline __m128i bytes_of(Ints value) {
  const __m256i low_bytes = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                             0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i a = _mm256_shuffle_epi8(value.low, low_bytes), b = _mm256_shuffle_epi8(value.high, low_bytes);
  const __m256i both = _mm256_unpacklo_epi32(a, b);  // numbers 0-3, 8-11; in the other half 4-7, 12-15
  return _mm_unpacklo_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
}
inline void store_bytes(void* to, Ints value) {
  _mm_storeu_si128(static_cast<__m128i*>(to), bytes_of(value));
}
inline void store_bytes(void* to, Ints value, Mask mask) {
  if (mask == kAllLanes) return store_bytes(to, value);
  alignas(16) char all[16];
  store_bytes(all, value);
  copy_some<1>(to, all, mask);
}
template <class Number, class Vector>
void keep_some(Number* to, Vector value, Mask mask) {
  alignas(32) Number all[kLanes];
  store(all, value);
  for (unsigned rest = mask; rest; rest &= rest - 1) *to++ = all[__builtin_ctz(rest)];
}
inline void store_kept(float* to, Floats value, Mask mask) { keep_some(to, value, mask); }
inline void store_kept(int32_t* to, Ints value, Mask mask) { keep_some(to, value, mask); }

inline Floats widen(Shorts bits) {
  auto wide = [](__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); };
  return {wide(_mm256_castsi256_si128(bits)), wide(_mm256_extracti128_si256(bits, 1))};
}
// Rounds to nearest, ties to even; NaN stays NaN.
inline Shorts narrow(Floats value) {
  auto half = [](__m256 wide) {
    const __m256i bits = _mm256_castps_si256(wide);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, none), 16);
  };
  const __m256i both = _mm256_packus_epi32(half(value.low), half(value.high));
  return _mm256_permute4x64_epi64(both, 0xD8);  // packing goes by halves of registers
}
inline Floats load(const BF16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline Floats load(const BF16* from, Mask mask) {
  if (mask == kAllLanes) return load(from);
  alignas(32) BF16 some[kLanes] = {};
  copy_some<2>(some, from, mask);
  return load(some);
}
inline void store(BF16* to, Floats value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(value)); }
inline void store(BF16* to, Floats value, Mask mask) {
  if (mask == kAllLanes) return store(to, value);
  alignas(32) BF16 all[kLanes];
  store(all, value);
  copy_some<2>(to, all, mask);
}
inline Floats from_halves(Shorts bits) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
}

// --- float32 ---

inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats fmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fmsub(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats abs(Floats a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline Floats round_to_integer(Floats a) {
  constexpr int kHow = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kHow), _mm256_round_ps(a.high, kHow)};
}
// n: -126 .. 127 where the mask is.
inline Floats scaled_where(Mask mask, Floats a, Floats n) {
  auto power = [](__m256 exponent) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  };
  const Floats scaled = mul(a, Floats{power(n.low), power(n.high)});
  return mask == kAllLanes ? scaled : select(mask, scaled, floats());
}
inline Floats mantissa_of(Floats x) {
  auto mantissa = [](__m256 wide) {
    const __m256i fraction = _mm256_and_si256(_mm256_castps_si256(wide), _mm256_set1_epi32(0x007FFFFF));
    return _mm256_castsi256_ps(_mm256_or_si256(fraction, _mm256_set1_epi32(0x3F000000)));
  };
  return {mantissa(x.low), mantissa(x.high)};
}
inline Floats exponent_of(Floats x) {
  auto exponent = [](__m256 wide) {
    const __m256i biased = _mm256_srli_epi32(_mm256_castps_si256(wide), 23);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(biased, _mm256_set1_epi32(126)));
  };
  return {exponent(x.low), exponent(x.high)};
}
// Adds the halves in the order of AVX-512's reduction.
inline float sum_of(Floats a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest_of(Floats a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

template <int HOW>
Mask compare(Floats a, Floats b) {
  return mask_of(_mm256_cmp_ps(a.low, b.low, HOW), _mm256_cmp_ps(a.high, b.high, HOW));
}
inline Mask greater(Floats a, Floats b) { return compare<_CMP_GT_OQ>(a, b); }
inline Mask greater_equal(Floats a, Floats b) { return compare<_CMP_GE_OQ>(a, b); }
inline Mask less(Floats a, Floats b) { return compare<_CMP_LT_OQ>(a, b); }
inline Mask less_equal(Floats a, Floats b) { return compare<_CMP_LE_OQ>(a, b); }
inline Mask equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask unordered(Floats a, Floats b) { return compare<_CMP_UNORD_Q>(a, b); }

// --- integers of 32 bits ---

inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Ints mul(Ints a, Ints b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline Ints bit_and(Ints a, Ints b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Ints bit_or(Ints a, Ints b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline Ints bit_xor(Ints a, Ints b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
template <int N>
Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.low, N), _mm256_slli_epi32(a.high, N)};
}
template <int N>
Ints shift_right(Ints a) {
  return {_mm256_srli_epi32(a.low, N), _mm256_srli_epi32(a.high, N)};
}
inline Mask less(Ints a, Ints b) {
  return mask_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.low, a.low)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.high, a.high)));
}
inline Mask equal(Ints a, Ints b) {
  return mask_of(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.low, b.low)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.high, b.high)));
}
inline int32_t sum_of(Ints a) {
  const __m256i eight = _mm256_add_epi32(a.low, a.high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}

inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
// Rounded once, as the conversion of 32 bits is: the halves' sum is exact but for that.
inline Floats to_floats_unsigned(Ints a) {
  const Floats high = to_floats(shift_right<16>(a)), low = to_floats(bit_and(a, ints(0xFFFF)));
  return fmadd(high, floats(65536.0f), low);
}
inline Ints rounded(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }

// 8 x 8 words: the halves of eight vectors.
inline void transpose8(__m256i* r) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x20);
    r[4 + i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x31);
  }
}

// 16 x 16 words.
inline void transpose16(Ints* r) {
  __m256i part[2][2][8];  // [rows from 0 or 8 on][their low or high half]
  for (int i = 0; i < 8; ++i) {
    part[0][0][i] = r[i].low, part[0][1][i] = r[i].high;
    part[1][0][i] = r[8 + i].low, part[1][1][i] = r[8 + i].high;
  }
  for (auto& rows : part) {
    for (auto& half : rows) transpose8(half);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = {part[0][0][i], part[1][0][i]};
    r[8 + i] = {part[0][1][i], part[1][1][i]};
  }
}

}  // namespace outrider
