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

// Addresses of up to 12 rows as four base registers and one stride.
template <int M>
struct RowPointers {
  const char* base[(M + 2) / 3];
  int64_t stride;
  RowPointers(const char* first, int64_t stride) : stride(stride) {
    for (int i = 0; i < (M + 2) / 3; ++i) base[i] = first + 3 * i * stride;
  }
  const char* at(int m) const { return base[m / 3] + (m % 3) * stride; }
  void advance(int64_t bytes) {
    for (auto& pointer : base) pointer += bytes;
  }
};

constexpr int kPrefetch = 2048;  // bytes ahead of the stream of weights

// tile: [M][Z * 16] float32. weight: the panel, or its upper half's first byte if Z is 1 (a step is always 128 bytes).
template <int M, int Z>
void tile_float32(const char* weight, int64_t k, const Operand& x, int64_t row, float* tile) {
  __m512 sum[M][Z];
  for (auto& line : sum) for (auto& part : line) part = _mm512_setzero_ps();
  RowPointers<M> rows(x.data + row * x.stride, x.stride);
  for (int64_t i = 0; i < k; ++i, weight += 128, rows.advance(4)) {
    __m512 w[Z];
#pragma GCC unroll 2
    for (int z = 0; z < Z; ++z) {
      w[z] = _mm512_loadu_ps(weight + 64 * z);
      _mm_prefetch(weight + kPrefetch + 64 * z, _MM_HINT_T0);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      float value;
      std::memcpy(&value, rows.at(m), 4);
      const __m512 b = _mm512_set1_ps(value);
#pragma GCC unroll 2
      for (int z = 0; z < Z; ++z) sum[m][z] = _mm512_fmadd_ps(b, w[z], sum[m][z]);
    }
  }
  for (int m = 0; m < M; ++m) for (int z = 0; z < Z; ++z) _mm512_storeu_ps(tile + (m * Z + z) * kLanes, sum[m][z]);
}

template <int M, int Z>
void tile_bfloat16(const char* weight, int64_t k, const Operand& x, int64_t row, float* tile) {
  __m512 sum[M][Z];
  for (auto& line : sum) for (auto& part : line) part = _mm512_setzero_ps();
  RowPointers<M> rows(x.data + row * x.stride, x.stride);
  for (int64_t i = 0; i < k; i += 2, weight += 128, rows.advance(4)) {
    __m512bh w[Z];
#pragma GCC unroll 2
    for (int z = 0; z < Z; ++z) {
      w[z] = __m512bh(_mm512_loadu_ps(weight + 64 * z));
      _mm_prefetch(weight + kPrefetch + 64 * z, _MM_HINT_T0);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, rows.at(m), 4);
      const __m512bh b = __m512bh(_mm512_set1_epi32(pair));
#pragma GCC unroll 2
      for (int z = 0; z < Z; ++z) sum[m][z] = _mm512_dpbf16_ps(sum[m][z], w[z], b);
    }
  }
  for (int m = 0; m < M; ++m) for (int z = 0; z < Z; ++z) _mm512_storeu_ps(tile + (m * Z + z) * kLanes, sum[m][z]);
}

// scales: [Z * 16], of the outputs.
template <int M, int Z>
void tile_int8(const char* weight, int64_t k, const Operand& x, int64_t row, const float* scales, float* tile) {
  __m512 sum[M][Z];
  for (auto& line : sum) for (auto& part : line) part = _mm512_setzero_ps();
  RowPointers<M> rows(x.data + row * x.stride, x.stride);
  const float* row_scales = x.scales + row * x.groups;
  const int32_t* offsets = x.offsets + row * x.groups;
  for (int64_t group = 0; group < k / kGroup; ++group) {
    __m512i part[M][Z];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      for (int z = 0; z < Z; ++z) part[m][z] = _mm512_set1_epi32(offsets[m * x.groups + group]);
    }
    for (int i = 0; i < kGroup / 4; ++i, weight += 128, rows.advance(4)) {
      __m512i w[Z];
#pragma GCC unroll 2
      for (int z = 0; z < Z; ++z) {
        w[z] = _mm512_loadu_si512(weight + 64 * z);
        _mm_prefetch(weight + kPrefetch + 64 * z, _MM_HINT_T0);
      }
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        int32_t quad;
        std::memcpy(&quad, rows.at(m), 4);
        const __m512i b = _mm512_set1_epi32(quad);
#pragma GCC unroll 2
        for (int z = 0; z < Z; ++z) part[m][z] = _mm512_dpbusd_epi32(part[m][z], w[z], b);
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const __m512 scale = _mm512_set1_ps(row_scales[m * x.groups + group]);
      for (int z = 0; z < Z; ++z) sum[m][z] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[m][z]), scale, sum[m][z]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int z = 0; z < Z; ++z) {
      _mm512_storeu_ps(tile + (m * Z + z) * kLanes, _mm512_mul_ps(sum[m][z], _mm512_loadu_ps(scales + z * kLanes)));
    }
  }
}

// half: 1 if `weight` is the upper half of the panel (Z is 1 then).
template <int M, int Z>
void tile_int4(const char* weight, int64_t k, const Operand& x, int64_t row, int half, float* tile) {
  __m512 sum[M][Z];
  for (auto& line : sum) for (auto& part : line) part = _mm512_setzero_ps();
  RowPointers<M> rows(x.data + row * x.stride, x.stride);
  const float* row_scales = x.scales + row * x.groups;
  const int32_t* offsets = x.offsets + row * x.groups;
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int64_t group = 0; group < k / kGroup; ++group) {
    __m512i part[M][Z];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      for (int z = 0; z < Z; ++z) part[m][z] = _mm512_set1_epi32(offsets[m * x.groups + group]);
    }
    for (int i = 0; i < kGroup / 8; ++i, weight += 128, rows.advance(8)) {
      __m512i low[Z], high[Z];
#pragma GCC unroll 2
      for (int z = 0; z < Z; ++z) {
        const __m512i both = _mm512_loadu_si512(weight + 64 * z);
        low[z] = _mm512_and_si512(both, nibble);
        high[z] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
        _mm_prefetch(weight + kPrefetch + 64 * z, _MM_HINT_T0);
      }
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        int32_t quads[2];
        std::memcpy(quads, rows.at(m), 8);
        const __m512i b0 = _mm512_set1_epi32(quads[0]), b1 = _mm512_set1_epi32(quads[1]);
#pragma GCC unroll 2
        for (int z = 0; z < Z; ++z) {
          part[m][z] = _mm512_dpbusd_epi32(part[m][z], low[z], b0);
          part[m][z] = _mm512_dpbusd_epi32(part[m][z], high[z], b1);
        }
      }
    }
    const __m256i* scales = reinterpret_cast<const __m256i*>(weight - 64 * half) + half;
    __m512 column[Z];
    for (int z = 0; z < Z; ++z) column[z] = _mm512_cvtph_ps(_mm256_loadu_si256(scales + z));
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const __m512 scale = _mm512_set1_ps(row_scales[m * x.groups + group]);
      for (int z = 0; z < Z; ++z) {
        sum[m][z] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[m][z]), _mm512_mul_ps(scale, column[z]), sum[m][z]);
      }
    }
    weight += 64;
  }
  for (int m = 0; m < M; ++m) for (int z = 0; z < Z; ++z) _mm512_storeu_ps(tile + (m * Z + z) * kLanes, sum[m][z]);
}

// Both halves of a panel for M rows. tile: [M][32]
template <int M>
void panel_rows(const Weight& weight, int64_t index, const Operand& x, int64_t row, float* tile) {
  const char* panel = weight.panel(index);
  if (weight.format == Format::kFloat32) return tile_float32<M, 2>(panel, weight.k, x, row, tile);
  if (weight.format == Format::kBFloat16) return tile_bfloat16<M, 2>(panel, weight.k, x, row, tile);
  const bool int8 = weight.format == Format::kInt8;
  const float* scales = weight.scales.as<float>() + index * kPanel;
  if constexpr (M <= 6) {  // two sums a row and output: registers for six rows
    if (int8) return tile_int8<M, 2>(panel, weight.k, x, row, scales, tile);
    return tile_int4<M, 2>(panel, weight.k, x, row, 0, tile);
  } else {
    float part[2][M * kLanes];
    for (int half = 0; half < 2; ++half) {
      if (int8) tile_int8<M, 1>(panel + 64 * half, weight.k, x, row, scales + half * kLanes, part[half]);
      else tile_int4<M, 1>(panel + 64 * half, weight.k, x, row, half, part[half]);
    }
    for (int m = 0; m < M; ++m) {
      for (int half = 0; half < 2; ++half) {
        _mm512_storeu_ps(tile + m * kPanel + half * kLanes, _mm512_loadu_ps(part[half] + m * kLanes));
      }
    }
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
