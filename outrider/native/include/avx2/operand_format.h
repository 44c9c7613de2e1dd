// The number format of activations in an operand: float32 for weights of floats; for weights of 8 bits, whose
// products take even and odd inputs separately, 16 bits in groups of four in the order 0 2 1 3; for narrower weights 8 bits.
#pragma once

#include "simd.h"
#include "weights/weight.h"

namespace outrider {

// Bytes of a number, and of a chunk.
constexpr int64_t width_of_operand(Format format) {
  if (format == Format::kInt8 || format == Format::kSymmetric8) return 2;
  return is_floating(format) ? 4 : 1;
}
constexpr int64_t bytes_of_chunk(Format format) { return width_of_operand(format) == 2 ? 128 : 64; }

// Stores 16 8-bit numbers of a chunk, from number `first` on, a multiple of 16.
inline void store_int8(char* chunk, Format format, int64_t first, Ints value) {
  if (width_of_operand(format) == 1) return store_bytes(chunk + first, value);
  auto pairs = [](__m256i eight) {  // in the first 64 bits of each half
    const __m256i upper = _mm256_shuffle_epi32(_mm256_slli_epi32(eight, 16), _MM_SHUFFLE(3, 2, 3, 2));
    return _mm256_or_si256(_mm256_and_si256(eight, _mm256_set1_epi32(0xFFFF)), upper);
  };
  const __m256i both = _mm256_unpacklo_epi64(pairs(value.low), pairs(value.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(chunk + 2 * first), _mm256_permute4x64_epi64(both, 0xD8));
}
inline Ints load_int8(const char* chunk, Format format, int64_t first, Mask mask) {
  if (width_of_operand(format) == 1) return load_bytes(chunk + first, mask);
  constexpr int kInOrder = _MM_SHUFFLE(3, 1, 2, 0);
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk + 2 * first));
  const __m256i all = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(pairs, kInOrder), kInOrder);
  const Ints wide{_mm256_cvtepi16_epi32(_mm256_castsi256_si128(all)),
                  _mm256_cvtepi16_epi32(_mm256_extracti128_si256(all, 1))};
  return mask == kAllLanes ? wide : select(mask, wide, ints());
}

}  // namespace outrider
