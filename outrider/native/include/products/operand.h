// Rows of activations in the layout of products.
//
// The number format follows the weight's format (operand_format.h): 8 bits for int8, int4 and block formats of whole numbers,
// with a scale for each 64 numbers of a row. Rows are cut into chunks, and the chunks of all rows are adjacent, so that the addresses of many rows are one
// register plus constants.
#pragma once

#include <algorithm>

#include "operand_format.h"

namespace outrider {

struct Operand {
  char* data = nullptr;        // [chunks, rows, bytes of a chunk]
  float* scales = nullptr;     // of 8 bits: [chunks, rows]
  // Corrections for the bias of the weights' unsigned values: int8 [chunks, rows]; int4 [chunks, 2, rows], per 32 numbers;
  // symmetric formats [chunks, parts, rows]
  int32_t* offsets = nullptr;
  float* block_sums = nullptr;  // affine formats, in place of offsets: sums of a part's numbers, in units of the scale
  uint32_t* sums = nullptr;    // int4: [chunks, rows], sums of the first and of the last 32 numbers, as two bfloat16
  int64_t rows = 0;
};

inline int64_t chunks_of(const Weight& weight) {
  const int64_t bytes = bytes_of_chunk(weight.format);
  return (weight.k * width_of_operand(weight.format) + bytes - 1) / bytes;
}

// Sums of a chunk's numbers that meet a weight's zero or minima.
constexpr int sums_of_chunk(Format format) {
  return is_block(format) ? block_format(format).parts() : format == Format::kInt8 ? 1 : 2;
}

// Bytes of an operand with `rows` rows, scales and corrections included.
inline size_t operand_bytes(const Weight& weight, int64_t rows) {
  return chunks_of(weight) * rows * (bytes_of_chunk(weight.format) + 8 + 4 * sums_of_chunk(weight.format));
}

inline Operand operand_in(char* memory, const Weight& weight, int64_t rows) {
  const int64_t count = chunks_of(weight) * rows;
  float* scales = reinterpret_cast<float*>(memory + count * bytes_of_chunk(weight.format));
  int32_t* offsets = reinterpret_cast<int32_t*>(scales + count);
  uint32_t* sums = reinterpret_cast<uint32_t*>(offsets + sums_of_chunk(weight.format) * count);
  return Operand{memory, scales, offsets, scales + count, sums, rows};
}

// Quantizes 64 numbers to 8 bits.
inline void fill_chunk(char* to, Format format, const Floats* part, float* scale, Ints value[4]) {
  const Floats largest = max(max(abs(part[0]), abs(part[1])), max(abs(part[2]), abs(part[3])));
  *scale = largest_of(largest) / 127.0f;
  const Floats inverse = floats(*scale > 0.0f ? 1.0f / *scale : 0.0f);
  for (int i = 0; i < 4; ++i) {
    value[i] = rounded(mul(part[i], inverse));
    store_int8(to, format, i * kLanes, value[i]);
  }
}

// Stores what a part's numbers add to its products: the zero of a symmetric format times their sum, or, for the minimum of an
// affine one, the sum itself.
inline void fill_part(const Operand& operand, Format format, int64_t chunk, int64_t row, int part, int32_t sum) {
  const BlockFormat block = block_format(format);
  const int64_t index = (chunk * block.parts() + part) * operand.rows + row;
  if (block.affine()) operand.block_sums[index] = float(sum);
  else operand.offsets[index] = -block.zero * sum;
}

// Stores the corrections and sums of a chunk. value: its numbers, 16 each
inline void fill_corrections(const Operand& operand, Format format, int64_t chunk, int64_t row, const Ints value[4]) {
  if (block_format(format).parts() == 4 && is_block(format)) {  // of 16 numbers: the first and third, then the others
    for (int i = 0; i < 4; ++i) fill_part(operand, format, chunk, row, i % 2 * 2 + i / 2, sum_of(value[i]));
    return;
  }
  const int32_t sums[2] = {sum_of(add(value[0], value[1])), sum_of(add(value[2], value[3]))};
  if (is_block(format)) {
    for (int i = 0; i < 2; ++i) fill_part(operand, format, chunk, row, i, sums[i]);
    return;
  }
  const int64_t index = chunk * operand.rows + row;
  if (format == Format::kInt8) {
    operand.offsets[index] = -128 * (sums[0] + sums[1]);
    return;
  }
  const float scale = operand.scales[index];
  const uint32_t second = bfloat16_bits(scale * float(sums[1]));
  operand.sums[index] = second << 16 | bfloat16_bits(scale * float(sums[0]));
  for (int i = 0; i < 2; ++i) operand.offsets[(2 * chunk + i) * operand.rows + row] = -8 * sums[i];
}

constexpr int64_t kChunkNumbers = kGroup;  // numbers; a whole number of chunks in every format

// Stores the numbers begin .. end - 1 of a row of float32 or bfloat16 in the operand. begin: a multiple of kChunkNumbers; end:
// the same, or the end of the row, which is padded with zeros to weight.k. from: [weight.inputs]
template <class T>
void fill_operand(const Operand& operand, const Weight& weight, int64_t row, const T* from, int64_t begin, int64_t end) {
  const Format format = weight.format;
  const int64_t width = width_of_operand(format), bytes = bytes_of_chunk(format), numbers = bytes / width;
  const int64_t until = end == weight.inputs ? weight.k : end;
  int64_t chunk = begin / numbers;
  for (int64_t first = begin; first < until; first += numbers, ++chunk) {
    const int64_t index = chunk * operand.rows + row;
    char* to = operand.data + index * bytes;
    const int64_t count = std::min(numbers, end - first);
    if (is_floating(format) && width == 4) {
      store(reinterpret_cast<float*>(to), load(from + first, lanes(count)));
    } else if (is_floating(format)) {
      for (int i = 0; i < 2; ++i) {
        const int64_t start = i * kLanes;
        store(reinterpret_cast<BF16*>(to) + start, load(from + first + start, lanes(count - start)));
      }
    } else {
      Floats part[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t start = i * kLanes;
        part[i] = count == numbers ? load(from + first + start) : load(from + first + start, lanes(count - start));
      }
      Ints value[4];
      fill_chunk(to, format, part, operand.scales + index, value);
      fill_corrections(operand, format, chunk, row, value);
    }
  }
}

// Loads 16 8-bit numbers of an operand with one row, from number i on, a multiple of 16.
inline Ints load_int8(const Operand& operand, const Weight& weight, int64_t i, Mask mask) {
  const char* chunk = operand.data + i / kGroup * bytes_of_chunk(weight.format);
  return load_int8(chunk, weight.format, i % kGroup, mask);
}

// Stores a whole row.
template <class T>
void fill_operand(const Operand& operand, const Weight& weight, int64_t row, const T* from) {
  fill_operand(operand, weight, row, from, 0, weight.inputs);
}

}  // namespace outrider
