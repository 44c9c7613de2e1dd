// 8-bit floats (E4M3) as bfloat16, by NEON.
#pragma once

#include "dot_steps.h"

namespace outrider {

constexpr int kPassesOfFew = 1;  // up to which numbers are widened as they are multiplied, which is faster for few rows

// Two k of eight outputs as bfloat16, times 2^-8, byte by byte: the upper byte has the sign and the exponent's upper bits, the
// lower one its last bit and the fraction. Numbers below 16 steps of 2^-9, of which half have no exponent, are in tables.
struct Float8Lines {
  const uint8x16_t upper = {0, 0x37, 0x37, 0x37, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38};
  const uint8x16_t lower = {0, 0, 0x80, 0xC0, 0, 0x20, 0x40, 0x60, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0};

  INLINED void load(const char* from, uint8x16_t& first, uint8x16_t& second) const {
    const uint8x16_t bits = load_vector(from), size = vandq_u8(bits, vdupq_n_u8(0x7F));
    const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(bits, 4), lower, size);
    const uint8x16_t high = vqtbx1q_u8(vsraq_n_u8(vdupq_n_u8(0x38), size, 4), upper, size);
    const uint8x16_t all = vbslq_u8(vdupq_n_u8(0x80), bits, high);
    first = vzip1q_u8(low, all), second = vzip2q_u8(low, all);
  }
  // A line of 128 numbers. to: 256 bytes
  void widen(const char* from, char* to) const {
    for (int i = 0; i < 8; ++i) {
      uint8x16_t w[2];
      load(from + i * 16, w[0], w[1]);
      for (int j = 0; j < 2; ++j) vst1q_u8(reinterpret_cast<uint8_t*>(to) + i * 32 + j * 16, w[j]);
    }
  }
};

}  // namespace outrider
