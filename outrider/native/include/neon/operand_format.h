// The number format of activations in an operand: the weight's format, bfloat16 for float8, and 8 bits for whole numbers;
// float32 in place of bfloat16 where the processor has no dot products of bfloat16.
#pragma once

#include "simd.h"
#include "weights/weight.h"

namespace outrider {

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
constexpr bool kMultipliesBFloat16 = true;
#else
constexpr bool kMultipliesBFloat16 = false;
#endif

// Bytes of a number, and of a chunk.
constexpr int64_t width_of_operand(Format format) {
  if (format == Format::kFloat32) return 4;
  if (is_floating(format)) return kMultipliesBFloat16 ? 2 : 4;
  return 1;
}
constexpr int64_t bytes_of_chunk(Format) { return 64; }

// Stores 16 8-bit numbers of a chunk, from number `first` on, a multiple of 16.
inline void store_int8(char* chunk, Format, int64_t first, Ints value) { store_bytes(chunk + first, value); }
inline Ints load_int8(const char* chunk, Format, int64_t first, Mask mask) { return load_bytes(chunk + first, mask); }

}  // namespace outrider
