// Single instructions of x86 processors: hints, and conversions of half-precision numbers. arm/ has the same functions.
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

}  // namespace outrider
