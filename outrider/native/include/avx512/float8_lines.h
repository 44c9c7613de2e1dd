// 8-bit floats (E4M3) as bfloat16, by AVX-512.
#pragma once

#include "simd.h"

namespace outrider {

constexpr int kPassesOfFew = 1;  // up to which numbers are widened as they are multiplied, which is faster for few rows

// Widens 8-bit floats to bfloat16, times 2^-8. Sign, exponent and fraction move to their places, and the exponent's upper bits
// are set. The instruction that multiplies takes subnormal numbers of bfloat16 as 0, so the eight numbers without an exponent
// get one from a table.
struct Float8Lines {
  const __m512i ordinary = _mm512_set1_epi16(0x3800), exponent = _mm512_set1_epi16(0x78), kept = _mm512_set1_epi16(int16_t(0x87F0));
  // What changes the bits of k 2^-17, k = 0 ... 7, which are k 2^4 by then.
  const __m512i subnormal = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3710, 0x37A0, 0x37F0, 0x3840, 0x3870, 0x3820, 0x3810));

  // Two k of 16 outputs.
  [[gnu::always_inline]] __m512i load(const char* from) const {
    constexpr int kChanged = 0x6A;  // (a & b) ^ c
    const __m512i bits = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __mmask32 small = _mm512_testn_epi16_mask(bits, exponent);
    const __m512i change = _mm512_mask_permutexvar_epi16(ordinary, small, bits, subnormal);
    return _mm512_ternarylogic_epi32(_mm512_slli_epi16(bits, 4), kept, change, kChanged);
  }
  // A line of 128 numbers. to: 256 bytes
  [[gnu::always_inline]] void widen(const char* from, char* to) const {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(to + i * 64, load(from + i * 32));
  }
};

}  // namespace outrider
