// How numbers of activations lie in an operand: in the format of the weight, 8 bits for int8 and int4 weights.
#pragma once

#include "simd.h"
#include "weight.h"

namespace outrider {

// Bytes of a number, and of a chunk.
constexpr int64_t width_of_operand(Format format) {
  return format == Format::kFloat32 ? 4 : format == Format::kBFloat16 ? 2 : 1;
}
constexpr int64_t bytes_of_chunk(Format) { return 64; }

// 16 numbers of 8 bits, from the `first`-th of a chunk on, a multiple of 16.
inline void store_eight(char* chunk, Format, int64_t first, Ints value) { store_bytes(chunk + first, value); }
inline Ints load_eight(const char* chunk, Format, int64_t first, Mask mask) { return load_bytes(chunk + first, mask); }

}  // namespace outrider
