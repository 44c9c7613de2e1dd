// Products of a few rows with a laid-out weight: y = x W^T.
//
// Each panel of 32 outputs is read once for up to 12 rows. Every row's sums run over k in one order, whatever rows stand
// beside it, so a row's result does not depend on the batch.
#pragma once

#include <algorithm>

#include "simd.h"
#include "weight.h"

namespace outrider {

constexpr int kMaxRows = 12;  // rows that one pass over a panel serves: 2 accumulators each, of 32 registers

// Rows of activations in the format that a weight wants. data: [rows] at `stride` bytes.
struct Operand {
  char* data = nullptr;
  int64_t stride = 0;
  float* scales = nullptr;     // int8, int4: [rows, groups]
  int32_t* offsets = nullptr;  // int8, int4: [rows, groups], what the weights' unsigned values count too much, negated
  int64_t groups = 0;
};

// Bytes of an operand with so many rows, everything included.
inline size_t operand_bytes(const Weight& weight, int64_t rows) {
  const int64_t row = round_up(weight.k * (weight.format == Format::kFloat32 ? 4 : weight.format == Format::kBFloat16 ? 2 : 1), 64);
  return rows * (row + round_up(weight.k / kGroup * 8, 64) + 64);
}

inline Operand operand_in(char* memory, const Weight& weight, int64_t rows) {
  Operand operand;
  const int64_t width = weight.format == Format::kFloat32 ? 4 : weight.format == Format::kBFloat16 ? 2 : 1;
  operand.data = memory;
  operand.stride = round_up(weight.k * width, 64);
  operand.groups = weight.k / kGroup;
  operand.scales = reinterpret_cast<float*>(memory + rows * operand.stride);
  operand.offsets = reinterpret_cast<int32_t*>(operand.scales + rows * operand.groups);
  return operand;
}

// One row of float32 into the operand. from: [weight.inputs].
inline void fill_operand(const Operand& operand, const Weight& weight, int64_t row, const float* from) {
  char* to = operand.data + row * operand.stride;
  const int64_t inputs = weight.inputs;
  if (weight.format == Format::kFloat32) {
    std::memcpy(to, from, inputs * 4);
    return;
  }
  if (weight.format == Format::kBFloat16) {
    BF16* out = reinterpret_cast<BF16*>(to);
    int64_t i = 0;
    for (; i + kLanes <= inputs; i += kLanes) store(out + i, load(from + i));
    if (i < inputs) store(out + i, load(from + i, lanes(inputs - i)), lanes(inputs - i));
    if (inputs % 2) out[inputs].bits = 0;
    return;
  }
  const int bias = weight.format == Format::kInt8 ? 128 : 8;
  for (int64_t group = 0; group < operand.groups; ++group) {
    __m512 part[4];
    __m512 largest = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      const int64_t start = group * kGroup + i * kLanes;
      part[i] = load(from + start, lanes(inputs - start));
      largest = _mm512_max_ps(largest, _mm512_abs_ps(part[i]));
    }
    const float scale = _mm512_reduce_max_ps(largest) / 127.0f;
    const __m512 inverse = _mm512_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) {
      const __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse));
      sum = _mm512_add_epi32(sum, value);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + group * kGroup + i * kLanes), _mm512_cvtepi32_epi8(value));
    }
    operand.scales[row * operand.groups + group] = scale;
    operand.offsets[row * operand.groups + group] = -bias * _mm512_reduce_add_epi32(sum);
  }
}

// Addresses of up to 12 rows as four base registers and one stride. Not an array: compilers leave those in memory.
struct RowPointers {
  const char *a, *b, *c, *d;
  int64_t stride;
  RowPointers(const char* first, int64_t stride)
      : a(first), b(first + 3 * stride), c(first + 6 * stride), d(first + 9 * stride), stride(stride) {}
  const char* at(int m) const { return (m < 3 ? a : m < 6 ? b : m < 9 ? c : d) + (m % 3) * stride; }
  void advance(int64_t bytes) {
    a += bytes;
    b += bytes;
    c += bytes;
    d += bytes;
  }
};

// sum += dot products of pairs (fours) of each 32 bits of w and x. Written out because compilers copy the sums about.
inline void dot_pairs(__m512& sum, __m512i w, __m512i x) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
inline void dot_fours(__m512i& sum, __m512i w, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }

constexpr int kPrefetch = 4096;  // bytes ahead of the stream of weights

// tile: [M][32] float32; the rows are row .. row + M - 1 of x.
template <int M>
void tile_float32(const char* weight, int64_t k, const Operand& x, int64_t row, float* tile) {
  __m512 sum[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
  RowPointers rows(x.data + row * x.stride, x.stride);
  for (int64_t i = 0; i < k; i += 1, weight += 128, rows.advance(4)) {
    const __m512 w0 = __m512(_mm512_loadu_ps(weight)), w1 = __m512(_mm512_loadu_ps(weight + 64));
    _mm_prefetch(weight + kPrefetch, _MM_HINT_T0);
    _mm_prefetch(weight + kPrefetch + 64, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      float value;
      std::memcpy(&value, rows.at(m), 4);
      const __m512 b = _mm512_set1_ps(value);
      sum[m][0] = _mm512_fmadd_ps(b, w0, sum[m][0]);
      sum[m][1] = _mm512_fmadd_ps(b, w1, sum[m][1]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    _mm512_storeu_ps(tile + m * kPanel, sum[m][0]);
    _mm512_storeu_ps(tile + m * kPanel + kLanes, sum[m][1]);
  }
}

template <int M>
void tile_bfloat16(const char* weight, int64_t k, const Operand& x, int64_t row, float* tile) {
  __m512 sum[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
  RowPointers rows(x.data + row * x.stride, x.stride);
  for (int64_t i = 0; i < k; i += 2, weight += 128, rows.advance(4)) {
    const __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(weight + 64);
    _mm_prefetch(weight + kPrefetch, _MM_HINT_T0);
    _mm_prefetch(weight + kPrefetch + 64, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, rows.at(m), 4);
      const __m512i b = _mm512_set1_epi32(pair);
      dot_pairs(sum[m][0], w0, b);
      dot_pairs(sum[m][1], w1, b);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    _mm512_storeu_ps(tile + m * kPanel, sum[m][0]);
    _mm512_storeu_ps(tile + m * kPanel + kLanes, sum[m][1]);
  }
}

// The sums of a group of 64 k, as integers in registers, are added to the tile as float32.
template <int M>
void add_group(const __m512i part[M][2], const Operand& x, int64_t row, int64_t group, const __m512* columns, float* tile) {
  const float* scales = x.scales + row * x.groups + group;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const __m512 scale = _mm512_set1_ps(scales[m * x.groups]);
#pragma GCC unroll 2
    for (int z = 0; z < 2; ++z) {
      float* to = tile + m * kPanel + z * kLanes;
      const __m512 factor = columns ? _mm512_mul_ps(scale, columns[z]) : scale;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[m][z]), factor, _mm512_loadu_ps(to)));
    }
  }
}

template <int M>
void begin_group(const Operand& x, int64_t row, int64_t group, __m512i part[M][2]) {
  const int32_t* offsets = x.offsets + row * x.groups + group;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) part[m][0] = part[m][1] = _mm512_set1_epi32(offsets[m * x.groups]);
}

// scales: [32], of the outputs.
template <int M>
void tile_int8(const char* weight, int64_t k, const Operand& x, int64_t row, const float* scales, float* tile) {
  std::memset(tile, 0, M * kPanel * sizeof(float));
  RowPointers rows(x.data + row * x.stride, x.stride);
  for (int64_t group = 0; group < k / kGroup; ++group) {
    __m512i part[M][2];
    begin_group<M>(x, row, group, part);
    for (int i = 0; i < kGroup / 4; ++i, weight += 128, rows.advance(4)) {
      const __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(weight + 64);
      _mm_prefetch(weight + kPrefetch, _MM_HINT_T0);
      _mm_prefetch(weight + kPrefetch + 64, _MM_HINT_T0);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        int32_t quad;
        std::memcpy(&quad, rows.at(m), 4);
        const __m512i b = _mm512_set1_epi32(quad);
        dot_fours(part[m][0], w0, b);
        dot_fours(part[m][1], w1, b);
      }
    }
    add_group<M>(part, x, row, group, nullptr, tile);
  }
  const __m512 column[2] = {_mm512_loadu_ps(scales), _mm512_loadu_ps(scales + kLanes)};
  for (int i = 0; i < 2 * M; ++i) {
    _mm512_storeu_ps(tile + i * kLanes, _mm512_mul_ps(_mm512_loadu_ps(tile + i * kLanes), column[i % 2]));
  }
}

template <int M>
void tile_int4(const char* weight, int64_t k, const Operand& x, int64_t row, float* tile) {
  std::memset(tile, 0, M * kPanel * sizeof(float));
  RowPointers rows(x.data + row * x.stride, x.stride);
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int64_t group = 0; group < k / kGroup; ++group) {
    __m512i part[M][2];
    begin_group<M>(x, row, group, part);
    for (int i = 0; i < kGroup / 8; ++i, weight += 128) {
      const __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(weight + 64);
      _mm_prefetch(weight + kPrefetch, _MM_HINT_T0);
      _mm_prefetch(weight + kPrefetch + 64, _MM_HINT_T0);
      const __m512i low[2] = {_mm512_and_si512(w0, nibble), _mm512_and_si512(w1, nibble)};
      const __m512i high[2] = {_mm512_and_si512(_mm512_srli_epi16(w0, 4), nibble),
                               _mm512_and_si512(_mm512_srli_epi16(w1, 4), nibble)};
#pragma GCC unroll 2
      for (const auto* w : {low, high}) {
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          int32_t quad;
          std::memcpy(&quad, rows.at(m), 4);
          const __m512i b = _mm512_set1_epi32(quad);
          dot_fours(part[m][0], w[0], b);
          dot_fours(part[m][1], w[1], b);
        }
        rows.advance(4);
      }
    }
    const __m256i* scales = reinterpret_cast<const __m256i*>(weight);
    const __m512 columns[2] = {_mm512_cvtph_ps(_mm256_loadu_si256(scales)),
                               _mm512_cvtph_ps(_mm256_loadu_si256(scales + 1))};
    add_group<M>(part, x, row, group, columns, tile);
    weight += 64;
  }
}

// A panel for M rows. tile: [M][32]
template <int M>
void panel_rows(const Weight& weight, int64_t index, const Operand& x, int64_t row, float* tile) {
  const char* panel = weight.panel(index);
  switch (weight.format) {
    case Format::kFloat32: return tile_float32<M>(panel, weight.k, x, row, tile);
    case Format::kBFloat16: return tile_bfloat16<M>(panel, weight.k, x, row, tile);
    case Format::kInt8: return tile_int8<M>(panel, weight.k, x, row, weight.scales.as<float>() + index * kPanel, tile);
    case Format::kInt4: return tile_int4<M>(panel, weight.k, x, row, tile);
  }
}

using PanelKernel = void (*)(const Weight&, int64_t, const Operand&, int64_t, float*);
constexpr PanelKernel kPanelKernels[kMaxRows] = {
    panel_rows<1>, panel_rows<2>, panel_rows<3>, panel_rows<4>,  panel_rows<5>,  panel_rows<6>,
    panel_rows<7>, panel_rows<8>, panel_rows<9>, panel_rows<10>, panel_rows<11>, panel_rows<12>};

// One panel for all rows. epilogue(row, count, tile): takes [count][32] results of rows row .. row + count - 1.
template <class Epilogue>
void multiply_panel(const Weight& weight, int64_t index, const Operand& x, int64_t rows, Epilogue&& epilogue) {
  alignas(64) float tile[kMaxRows * kPanel];
  const int64_t passes = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t pass = 0; pass < passes; ++pass) {  // passes of like size: 13 rows are 7 and 6
    const int64_t row = rows * pass / passes, count = rows * (pass + 1) / passes - row;
    kPanelKernels[count - 1](weight, index, x, row, tile);
    epilogue(row, count, tile);
  }
}

}  // namespace outrider
