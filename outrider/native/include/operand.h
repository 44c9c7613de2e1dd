// Rows of activations as products want them.
//
// They are in the format of the weight, bfloat16 rounded, 8 bits for int8 and int4 weights with a scale for each 64 numbers
// of a row. They come in chunks of 64 bytes, those of all rows side by side, so that the addresses of many rows are one
// register and constants.
#pragma once

#include <algorithm>

#include "simd.h"
#include "weight.h"

namespace outrider {

constexpr int64_t kChunk = 64;  // bytes

struct Operand {
  char* data = nullptr;        // [chunks, rows, 64]
  float* scales = nullptr;     // int8, int4: [chunks, rows]
  int32_t* offsets = nullptr;  // int8, int4: [chunks, rows], what the weights' unsigned values count too much, negated
  int64_t rows = 0;
};

inline int64_t width_of_operand(Format format) {
  return format == Format::kFloat32 ? 4 : format == Format::kBFloat16 ? 2 : 1;
}

inline int64_t chunks_of(const Weight& weight) {
  return (weight.k * width_of_operand(weight.format) + kChunk - 1) / kChunk;
}

// Bytes of an operand with so many rows, everything included.
inline size_t operand_bytes(const Weight& weight, int64_t rows) { return chunks_of(weight) * rows * (kChunk + 8); }

inline Operand operand_in(char* memory, const Weight& weight, int64_t rows) {
  const int64_t count = chunks_of(weight) * rows;
  float* scales = reinterpret_cast<float*>(memory + count * kChunk);
  return Operand{memory, scales, reinterpret_cast<int32_t*>(scales + count), rows};
}

// 64 numbers as 8 bits. Returns their sum; the scale is what a unit is worth.
inline int32_t fill_chunk(char* to, const __m512* part, float* scale) {
  const __m512 largest = _mm512_max_ps(_mm512_max_ps(_mm512_abs_ps(part[0]), _mm512_abs_ps(part[1])),
                                       _mm512_max_ps(_mm512_abs_ps(part[2]), _mm512_abs_ps(part[3])));
  *scale = _mm512_reduce_max_ps(largest) / 127.0f;
  const __m512 inverse = _mm512_set1_ps(*scale > 0.0f ? 1.0f / *scale : 0.0f);
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) {
    const __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse));
    sum = _mm512_add_epi32(sum, value);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * kLanes), _mm512_cvtepi32_epi8(value));
  }
  return _mm512_reduce_add_epi32(sum);
}

// One row of float32 or bfloat16 into the operand. from: [weight.inputs].
template <class T>
void fill_operand(const Operand& operand, const Weight& weight, int64_t row, const T* from) {
  const int64_t inputs = weight.inputs, numbers = kChunk / width_of_operand(weight.format);
  const int bias = weight.format == Format::kInt8 ? 128 : 8;
  int64_t index = row;
  for (int64_t first = 0; first < inputs; first += numbers, index += operand.rows) {
    char* to = operand.data + index * kChunk;
    const int64_t count = std::min(numbers, inputs - first);
    if (weight.format == Format::kFloat32) {
      store(reinterpret_cast<float*>(to), load(from + first, lanes(count)));
    } else if (weight.format == Format::kBFloat16) {
      for (int i = 0; i < 2; ++i) {
        const int64_t start = i * kLanes;
        store(reinterpret_cast<BF16*>(to) + start, load(from + first + start, lanes(count - start)));
      }
    } else {
      __m512 part[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t start = i * kLanes;
        part[i] = count == numbers ? load(from + first + start) : load(from + first + start, lanes(count - start));
      }
      operand.offsets[index] = -bias * fill_chunk(to, part, operand.scales + index);
    }
  }
}

}  // namespace outrider
