// Small vector helpers: number formats, reductions, exp. All are deterministic: a lane's result depends on that lane alone.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace outrider {

constexpr int kLanes = 16;

inline __mmask16 lanes(int64_t count) {
  return count >= kLanes ? __mmask16(0xFFFF) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// --- number formats: load 16 numbers as float32, store 16 as the format ---

struct BF16 {
  uint16_t bits;
};

inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

inline __m512 widen(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline __m512 load(const BF16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline __m512 load(const BF16* from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }

inline void store(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
inline void store(float* to, __m512 value, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, value); }

inline __m256i narrow(__m512 value) { return __m256i(_mm512_cvtneps_pbh(value)); }
inline void store(BF16* to, __m512 value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(value)); }
inline void store(BF16* to, __m512 value, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, narrow(value)); }

// --- functions ---

// e^x with an error below 2 units in the last place; 0 below -87.3, at most e^88.
inline __m512 exp512(__m512 x) {
  x = _mm512_min_ps(x, _mm512_set1_ps(88.0f));
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(__mmask16(~tiny), p, n);
}

inline __m512 sigmoid512(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp512(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// tanh(x) = 2 sigmoid(2x) - 1
inline __m512 tanh512(__m512 x) {
  const __m512 two = _mm512_set1_ps(2.0f);
  return _mm512_fmsub_ps(two, sigmoid512(_mm512_mul_ps(two, x)), _mm512_set1_ps(1.0f));
}

inline __m512 silu512(__m512 x) { return _mm512_mul_ps(x, sigmoid512(x)); }

// GELU with the tanh approximation.
inline __m512 gelu_tanh512(__m512 x) {
  const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_mul_ps(x, x), x), _mm512_set1_ps(0.044715f), x);
  return _mm512_mul_ps(x, sigmoid512(_mm512_mul_ps(cubic, _mm512_set1_ps(1.5957691216057308f))));
}

}  // namespace outrider
