// What AVX2 and AVX-512 processors have alike: hints, conversions of half-precision numbers, and vectors of 16 integers of 16
// bits. neon/ has the same functions, the vectors in its lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider {

// Prefetch a cache line into L1, or only into L2. Inline assembly, because compilers treat a function with nothing but a
// prefetch as one without effect and drop its calls.
inline void prefetch_l1(const void* from) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(from))); }
inline void prefetch_l2(const void* from) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(from))); }

// A hint in a loop that waits for another thread.
inline void spin_hint() { _mm_pause(); }

// Rounds to nearest, ties to even.
inline uint16_t half_bits(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float number_of_half(uint16_t bits) { return _cvtsh_ss(bits); }

// --- integers of 16 bits ---

using Shorts = __m256i;

inline Shorts shorts(int16_t value) { return _mm256_set1_epi16(value); }
inline Shorts bit_and(Shorts a, Shorts b) { return _mm256_and_si256(a, b); }
inline Shorts bit_or(Shorts a, Shorts b) { return _mm256_or_si256(a, b); }
template <int N>
Shorts shift_left(Shorts a) {
  return _mm256_slli_epi16(a, N);
}
// there where a equals b, otherwise elsewhere.
inline Shorts select_equal(Shorts a, Shorts b, Shorts there, Shorts otherwise) {
  return _mm256_blendv_epi8(otherwise, there, _mm256_cmpeq_epi16(a, b));
}

}  // namespace outrider
