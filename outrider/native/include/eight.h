// Numbers of 8 bits, as caches hold them: the two formats of PyTorch's float8_e4m3fn and float8_e5m2.
//
// Storing rounds to the nearest, ties to even, and saturates; what is not a number stays so. Every number of either format
// is one of bfloat16 and of float32, so loading is exact.
#pragma once

#include "simd.h"

namespace outrider {

struct E4M3 {
  uint8_t bits;
  static constexpr int kFraction = 3, kBias = 7;
  static constexpr float kMost = 448.0f, kLeastNormal = 0x1p-6f, kSteps = 0x1p9f;  // steps of subnormals in 1
};

struct E5M2 {
  uint8_t bits;
  static constexpr int kFraction = 2, kBias = 15;
  static constexpr float kMost = 57344.0f, kLeastNormal = 0x1p-14f, kSteps = 0x1p16f;
};

inline __m512 load(const E5M2* from, __mmask16 mask) {  // the upper half of a half-precision number
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(mask, from)), 8));
}
inline __m512 load(const E4M3* from, __mmask16 mask) {  // half precision with another bias
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(mask, from));
  const __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
  const __mmask16 none = _mm256_cmpeq_epi16_mask(rest, _mm256_set1_epi16(0x7F));
  const __m256i half = _mm256_mask_mov_epi16(_mm256_slli_epi16(rest, 7), none, _mm256_set1_epi16(0x7E00));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, sign)), _mm512_set1_ps(256.0f));
}

template <class E>
void store_eight(E* to, __m512 value, __mmask16 mask) {
  constexpr int kShift = 23 - E::kFraction;
  const __m512i bits = _mm512_castps_si512(value);
  const __m512 size = _mm512_min_ps(_mm512_set1_ps(E::kMost), _mm512_abs_ps(value));  // in this order NaN is kept
  const __m512i wide = _mm512_castps_si512(size);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, kShift), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32((1 << (kShift - 1)) - 1));
  __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(_mm512_add_epi32(wide, half), kShift),
                                  _mm512_set1_epi32((127 - E::kBias) << E::kFraction));
  const __mmask16 small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(E::kLeastNormal), _CMP_LT_OQ);
  code = _mm512_mask_mov_epi32(code, small, _mm512_cvtps_epi32(_mm512_mul_ps(size, _mm512_set1_ps(E::kSteps))));
  code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7F));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  _mm_mask_storeu_epi8(to, mask, _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign)));
}
inline void store(E4M3* to, __m512 value, __mmask16 mask) { store_eight(to, value, mask); }
inline void store(E5M2* to, __m512 value, __mmask16 mask) { store_eight(to, value, mask); }

enum class PoolFormat : int32_t { kFloat32 = 0, kBFloat16 = 1, kE4M3 = 2, kE5M2 = 3 };

// function(T, P): a number of the format that is computed in, and of that of the pools.
template <class Function>
void with_formats(bool bfloat16, PoolFormat pools, Function&& function) {
  auto with = [&](auto computed) {
    switch (pools) {
      case PoolFormat::kE4M3: return function(computed, E4M3{});
      case PoolFormat::kE5M2: return function(computed, E5M2{});
      case PoolFormat::kBFloat16: return function(computed, BF16{});
      default: return function(float{}, float{});  // there is no narrower computation on wide pools
    }
  };
  if (bfloat16) with(BF16{});
  else with(float{});
}

}  // namespace outrider
