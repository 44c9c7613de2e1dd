// 8-bit floats (E4M3) as bfloat16, by AVX2.
#pragma once

#include "simd.h"

namespace outrider {

constexpr int kPassesOfFew = 2;  // up to which numbers are widened as they are multiplied, which is faster for few rows

// Widens 8-bit floats to bfloat16, times 2^-8, byte by byte: the upper byte has the sign and the exponent's upper bits, the
// lower one its last bit and the fraction. Numbers below 16 steps of 2^-9, of which half have no exponent, are in tables.
struct Float8Lines {
  const __m256i upper = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 0x37, 0x37, 0x37, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38));
  const __m256i lower = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 0, char(0x80), char(0xC0), 0, 0x20, 0x40, 0x60, char(0x80), char(0x90), char(0xA0), char(0xB0), char(0xC0), char(0xD0),
      char(0xE0), char(0xF0)));

  // A line of 128 numbers. to: 256 bytes
  void widen(const char* from, char* to) const {
    const __m256i sign = _mm256_set1_epi8(char(0x80)), four = _mm256_set1_epi8(0x0F), bias = _mm256_set1_epi8(0x38);
    for (int i = 0; i < 4; ++i) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
      const __m256i size = _mm256_andnot_si256(sign, bits), small = _mm256_cmpgt_epi8(_mm256_set1_epi8(16), size);
      const __m256i low = _mm256_blendv_epi8(_mm256_andnot_si256(four, _mm256_slli_epi16(bits, 4)),
                                             _mm256_shuffle_epi8(lower, size), small);
      const __m256i exponent = _mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(size, 4), four), bias);
      const __m256i high = _mm256_or_si256(_mm256_blendv_epi8(exponent, _mm256_shuffle_epi8(upper, size), small),
                                           _mm256_and_si256(bits, sign));
      const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);  // of each half
      __m256i* out = reinterpret_cast<__m256i*>(to) + 2 * i;
      _mm256_storeu_si256(out, _mm256_permute2x128_si256(first, second, 0x20));
      _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(first, second, 0x31));
    }
  }
};

}  // namespace outrider
