// Single instructions of ARM processors: hints, and conversions of half-precision numbers; x86/processor.h documents them.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace outrider {

inline void prefetch_l1(const void* from) { asm volatile("prfm pldl1keep, [%0]" : : "r"(from)); }
inline void prefetch_l2(const void* from) { asm volatile("prfm pldl2keep, [%0]" : : "r"(from)); }

// isb, because yield does nothing on most ARM servers, and a spin loop without a delay fills the memory system with loads.
inline void spin_hint() { asm volatile("isb" : : : "memory"); }

inline uint16_t half_bits(float value) {
  const __fp16 half = __fp16(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}
inline float number_of_half(uint16_t bits) {
  __fp16 half;
  std::memcpy(&half, &bits, sizeof half);
  return float(half);
}

}  // namespace outrider
