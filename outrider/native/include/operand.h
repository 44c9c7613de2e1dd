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
  // What the weights' unsigned values count too much, negated: int8 [chunks, rows]; int4 [chunks, 2, rows], by 32 numbers
  int32_t* offsets = nullptr;
  uint32_t* sums = nullptr;    // int4: [chunks, rows], of the first and the last 32 numbers, as bfloat16
  int64_t rows = 0;
};

inline int64_t width_of_operand(Format format) {
  return format == Format::kFloat32 ? 4 : format == Format::kBFloat16 ? 2 : 1;
}

inline int64_t chunks_of(const Weight& weight) {
  return (weight.k * width_of_operand(weight.format) + kChunk - 1) / kChunk;
}

// Bytes of an operand with so many rows, everything included.
inline size_t operand_bytes(const Weight& weight, int64_t rows) { return chunks_of(weight) * rows * (kChunk + 16); }

inline Operand operand_in(char* memory, const Weight& weight, int64_t rows) {
  const int64_t count = chunks_of(weight) * rows;
  float* scales = reinterpret_cast<float*>(memory + count * kChunk);
  int32_t* offsets = reinterpret_cast<int32_t*>(scales + count);
  return Operand{memory, scales, offsets, reinterpret_cast<uint32_t*>(offsets + 2 * count), rows};
}

// 64 numbers as 8 bits. sums: of the first and of the last 32, in units of the scale.
inline void fill_chunk(char* to, const __m512* part, float* scale, int32_t sums[2]) {
  const __m512 largest = _mm512_max_ps(_mm512_max_ps(_mm512_abs_ps(part[0]), _mm512_abs_ps(part[1])),
                                       _mm512_max_ps(_mm512_abs_ps(part[2]), _mm512_abs_ps(part[3])));
  *scale = _mm512_reduce_max_ps(largest) / 127.0f;
  const __m512 inverse = _mm512_set1_ps(*scale > 0.0f ? 1.0f / *scale : 0.0f);
  __m512i value[4];
  for (int i = 0; i < 4; ++i) {
    value[i] = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * kLanes), _mm512_cvtepi32_epi8(value[i]));
  }
  for (int i = 0; i < 2; ++i) sums[i] = _mm512_reduce_add_epi32(_mm512_add_epi32(value[2 * i], value[2 * i + 1]));
}

// What products with a chunk need besides its numbers.
inline void fill_facts(const Operand& operand, Format format, int64_t chunk, int64_t row, const int32_t sums[2]) {
  const int64_t index = chunk * operand.rows + row;
  if (format == Format::kInt8) {
    operand.offsets[index] = -128 * (sums[0] + sums[1]);
    return;
  }
  const float scale = operand.scales[index];
  const __m128 real = _mm_setr_ps(scale * float(sums[0]), scale * float(sums[1]), 0.0f, 0.0f);
  operand.sums[index] = uint32_t(_mm_cvtsi128_si32(__m128i(_mm_cvtneps_pbh(real))));
  for (int i = 0; i < 2; ++i) operand.offsets[(2 * chunk + i) * operand.rows + row] = -8 * sums[i];
}

constexpr int64_t kMostOfChunk = kGroup;  // numbers; whole chunks of every format

// The numbers begin .. end - 1 of a row of float32 or bfloat16 into the operand. begin: a multiple of kMostOfChunk, and so
// is the end, or it is the row's. from: [weight.inputs]
template <class T>
void fill_operand(const Operand& operand, const Weight& weight, int64_t row, const T* from, int64_t begin, int64_t end) {
  const int64_t numbers = kChunk / width_of_operand(weight.format);
  int64_t chunk = begin / numbers;
  for (int64_t first = begin; first < end; first += numbers, ++chunk) {
    const int64_t index = chunk * operand.rows + row;
    char* to = operand.data + index * kChunk;
    const int64_t count = std::min(numbers, end - first);
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
      int32_t sums[2];
      fill_chunk(to, part, operand.scales + index, sums);
      fill_facts(operand, weight.format, chunk, row, sums);
    }
  }
}

// All of a row.
template <class T>
void fill_operand(const Operand& operand, const Weight& weight, int64_t row, const T* from) {
  fill_operand(operand, weight, row, from, 0, weight.inputs);
}

}  // namespace outrider
