// Vectors of 16 numbers, by AVX-512: the vocabulary of the kernels. avx2/lanes.h has the same functions for older processors.
//
// Functions of two vectors work lane by lane. A mask has one bit a lane; masked loads do not read the other lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "processor.h"

namespace outrider {

constexpr int kLanes = 16;
constexpr int kSums = 16;  // vectors of sums that a loop keeps in registers

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;

struct BF16 {
  uint16_t bits;
};

// --- the same number in all lanes ---

inline Floats floats(float value = 0.0f) { return _mm512_set1_ps(value); }
inline Ints ints(int32_t value = 0) { return _mm512_set1_epi32(value); }
inline Ints first_ints() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// --- from memory and back; formats of 16 and 8 bits become float32, and are rounded to the nearest ---

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, Mask mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline Floats load(const float* from, Mask mask, Floats otherwise) { return _mm512_mask_loadu_ps(otherwise, mask, from); }
inline Ints load_ints(const void* from) { return _mm512_loadu_si512(from); }
inline Ints load_ints(const void* from, Mask mask) { return _mm512_maskz_loadu_epi32(mask, from); }
inline Ints load_bytes(const char* from, Mask mask) { return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, from)); }
// Of unsigned bytes, 16 bits each.
inline Shorts load_shorts(const void* from, Mask mask) { return _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(mask, from)); }

inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline void store(float* to, Floats value, Mask mask) { _mm512_mask_storeu_ps(to, mask, value); }
inline void store(int32_t* to, Ints value) { _mm512_storeu_si512(to, value); }
inline void store_bytes(void* to, Ints value) { _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(value)); }
inline void store_bytes(void* to, Ints value, Mask mask) { _mm_mask_storeu_epi8(to, mask, _mm512_cvtepi32_epi8(value)); }
// Those of the mask side by side; behind them anything, up to a whole vector.
inline void store_kept(float* to, Floats value, Mask mask) { store(to, _mm512_maskz_compress_ps(mask, value)); }
inline void store_kept(int32_t* to, Ints value, Mask mask) { store(to, _mm512_maskz_compress_epi32(mask, value)); }

inline Floats widen(Shorts bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Shorts narrow(Floats value) { return __m256i(_mm512_cvtneps_pbh(value)); }
inline Floats load(const BF16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline Floats load(const BF16* from, Mask mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }
inline void store(BF16* to, Floats value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(value)); }
inline void store(BF16* to, Floats value, Mask mask) { _mm256_mask_storeu_epi16(to, mask, narrow(value)); }
inline Floats from_halves(Shorts bits) { return _mm512_cvtph_ps(bits); }

// --- float32 ---

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }    // a b - c
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b where one is not a number
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
inline Floats round_to_integer(Floats a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// a 2^n where the mask is, else 0; n: whole numbers.
inline Floats scaled_where(Mask mask, Floats a, Floats n) { return _mm512_maskz_scalef_ps(mask, a, n); }
// x = mantissa 2^exponent for normal x > 0; mantissa in [0.5, 1).
inline Floats mantissa_of(Floats x) { return _mm512_getmant_ps(x, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_src); }
inline Floats exponent_of(Floats x) { return add(_mm512_getexp_ps(x), floats(1.0f)); }
inline float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
inline float largest_of(Floats a) { return _mm512_reduce_max_ps(a); }

inline Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask greater_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask less_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline Floats select(Mask mask, Floats there, Floats otherwise) { return _mm512_mask_mov_ps(otherwise, mask, there); }

// --- integers of 32 bits ---

inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints mul(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
template <int N>
Ints shift_left(Ints a) {
  return _mm512_slli_epi32(a, N);
}
template <int N>
Ints shift_right(Ints a) {
  return _mm512_srli_epi32(a, N);
}
inline Mask less(Ints a, Ints b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Mask equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
inline Ints select(Mask mask, Ints there, Ints otherwise) { return _mm512_mask_mov_epi32(otherwise, mask, there); }
inline int32_t sum_of(Ints a) { return _mm512_reduce_add_epi32(a); }

inline Ints as_ints(Floats a) { return _mm512_castps_si512(a); }
inline Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats to_floats_unsigned(Ints a) { return _mm512_cvtepu32_ps(a); }
inline Ints rounded(Floats a) { return _mm512_cvtps_epi32(a); }

// 16 x 16 words.
inline void transpose16(Ints* r) {
  Ints t[16];
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

}  // namespace outrider
