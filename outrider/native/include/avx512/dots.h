// Products of a few rows with a panel, by dot products of vectors.
//
// Every row's sums run over k in a fixed order, so a row's result does not depend on the batch.
#pragma once

#include <array>
#include <utility>

#include "dot_steps.h"

namespace outrider {

// float32 and bfloat16. steps: of 128 bytes
template <class Dot, int M>
void tile_plain(const Pass& pass, int64_t steps) {
  __m512 sum[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
  const char *weight = pass.begin(), *x = pass.chunk(0);
  constexpr int64_t kSteps = kChunk / 4;  // of a chunk
  const int64_t jump = (pass.x.rows - 1) * kChunk;
  for (int64_t i = 0; i < steps; ++i, weight += 128) {
    const __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(weight + 64);
    pass.fetch(i);
    step<Dot, M>(sum, w0, w1, x);
    x += i % kSteps == kSteps - 1 ? jump + 4 : 4;
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    store(pass.tile + m * kPanel, sum[m][0]);
    store(pass.tile + m * kPanel + kLanes, sum[m][1]);
  }
}

// They, integers in registers, are added to the tile as float32. scales: of the rows
template <int M>
[[gnu::always_inline]] inline void add_group(float* tile, const __m512i sum[M][2], const float* scales) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const __m512 scale = _mm512_set1_ps(scales[m]);
#pragma GCC unroll 2
    for (int z = 0; z < 2; ++z, tile += kLanes) {
      store(tile, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m][z]), scale, load(tile)));
    }
  }
}

template <int M>
void tile_int8(const Pass& pass, int64_t groups) {
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  const char* weight = pass.begin();
  for (int64_t group = 0; group < groups; ++group) {
    __m512i sum[M][2];
    begin_group<M>(pass.x.offsets + group * pass.x.rows + pass.row, sum);
    const char* x = pass.chunk(group);
    for (int64_t i = 0; i < kGroup / 4; ++i, x += 4, weight += 128) {
      const __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(weight + 64);
      pass.fetch(group * kGroup / 4 + i);
      step<Fours, M>(sum, w0, w1, x);
    }
    add_group<M>(pass.tile, sum, pass.x.scales + group * pass.x.rows + pass.row);
  }
  pass.scale_columns(M);
}

// int4 weights have scales of their own for each half of a group, and centres, which meet the sums of the rows' numbers.
// first: [M][32] for what the first half comes to before the row's scale, taken up by the second
template <int M, bool HIGH>
[[gnu::always_inline]] inline void add_half(const Pass& pass, int64_t group, const __m512i sum[M][2], const char* scale_bytes,
                                            float* first) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(scale_bytes) + HIGH * 2;
  const float* scales = pass.x.scales + group * pass.x.rows + pass.row;
  const uint32_t* sums = pass.x.sums + group * pass.x.rows + pass.row;
  float* tile = pass.tile;
#pragma GCC unroll 2
  for (int z = 0; z < 2; ++z, tile += kLanes, first += kLanes) {  // one after the other, for want of registers
    const __m512 column = _mm512_cvtph_ps(_mm256_loadu_si256(halves + z));
    const __m512i centres = _mm512_loadu_si512(scale_bytes + 2 * kPanel * 2 + z * 64);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const __m512 real = _mm512_cvtepi32_ps(sum[m][z]);
      float *before = first + m * kPanel, *to = tile + m * kPanel;
      if (!HIGH) {
        store(before, _mm512_mul_ps(real, column));
        continue;
      }
      const __m512 both = _mm512_fmadd_ps(real, column, load(before));
      __m512 all = _mm512_fmadd_ps(both, _mm512_set1_ps(scales[m]), load(to));
      Pairs::add(all, centres, _mm512_set1_epi32(int32_t(sums[m])));
      store(to, all);
    }
  }
}

// 32 k of a group, the low or the high halves of its bytes. A loop with both would keep them beside all sums, and those of
// 12 rows leave no registers for that.
template <int M, bool HIGH>
[[gnu::always_inline]] inline void multiply_half(const Pass& pass, int64_t group, const char* weight, float* first) {
  constexpr int64_t kLines = kGroup / 8, kFetches = kLines + kInt4ScaleBytes / 128;  // of 128 bytes, in a group
  const __m512i nibble = _mm512_set1_epi8(15);
  auto unpacked = [&](const char* from) {
    const __m512i both = _mm512_loadu_si512(from);
    return _mm512_and_si512(HIGH ? _mm512_srli_epi16(both, 4) : both, nibble);
  };
  __m512i sum[M][2];
  begin_group<M>(pass.x.offsets + (2 * group + HIGH) * pass.x.rows + pass.row, sum);
  const char* x = pass.chunk(group) + HIGH * kChunk / 2;
#pragma GCC unroll 1
  for (int64_t i = 0; i < kLines; ++i, x += 4) {
    if (!HIGH) pass.fetch(group * kFetches + i);
    step<Fours, M>(sum, unpacked(weight + i * 128), unpacked(weight + i * 128 + 64), x);
  }
  hold<M>(sum);
  for (int64_t i = kLines; HIGH && i < kFetches; ++i) pass.fetch(group * kFetches + i);
  add_half<M, HIGH>(pass, group, sum, weight + kLines * 128, first);
}

// Of few rows: the halves in one loop, and nothing waits in memory between groups. To the same bits.
template <int M>
void tile_int4_of_few(const Pass& pass, int64_t groups) {
  constexpr int64_t kLines = kGroup / 8, kFetches = kLines + kInt4ScaleBytes / 128;
  const __m512i nibble = _mm512_set1_epi8(15);
  const char* weight = pass.begin();
  __m512 tile[M][2];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) tile[m][0] = tile[m][1] = _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; ++group, weight += kLines * 128 + kInt4ScaleBytes) {
    __m512i low[M][2], high[M][2];
    begin_group<M>(pass.x.offsets + 2 * group * pass.x.rows + pass.row, low);
    begin_group<M>(pass.x.offsets + (2 * group + 1) * pass.x.rows + pass.row, high);
    const char* x = pass.chunk(group);
#pragma GCC unroll 1
    for (int64_t i = 0; i < kLines; ++i, x += 4) {
      const __m512i w0 = _mm512_loadu_si512(weight + i * 128), w1 = _mm512_loadu_si512(weight + i * 128 + 64);
      pass.fetch(group * kFetches + i);
      step<Fours, M>(low, _mm512_and_si512(w0, nibble), _mm512_and_si512(w1, nibble), x);
      step<Fours, M>(high, _mm512_and_si512(_mm512_srli_epi16(w0, 4), nibble),
                     _mm512_and_si512(_mm512_srli_epi16(w1, 4), nibble), x + kChunk / 2);
    }
    hold<M>(low), hold<M>(high);
    for (int64_t i = kLines; i < kFetches; ++i) pass.fetch(group * kFetches + i);
    const char* scale_bytes = weight + kLines * 128;
    const __m256i* scales = reinterpret_cast<const __m256i*>(scale_bytes);
    const int64_t row = group * pass.x.rows + pass.row;
#pragma GCC unroll 2
    for (int z = 0; z < 2; ++z) {
      const __m512 first = _mm512_cvtph_ps(_mm256_loadu_si256(scales + z));
      const __m512 last = _mm512_cvtph_ps(_mm256_loadu_si256(scales + 2 + z));
      const __m512i centres = _mm512_loadu_si512(scale_bytes + 2 * kPanel * 2 + z * 64);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m512 half = _mm512_mul_ps(_mm512_cvtepi32_ps(low[m][z]), first);
        const __m512 both = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[m][z]), last, half);
        tile[m][z] = _mm512_fmadd_ps(both, _mm512_set1_ps(pass.x.scales[row + m]), tile[m][z]);
        Pairs::add(tile[m][z], centres, _mm512_set1_epi32(int32_t(pass.x.sums[row + m])));
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    store(pass.tile + m * kPanel, tile[m][0]);
    store(pass.tile + m * kPanel + kLanes, tile[m][1]);
  }
}

template <int M>
void tile_int4_of_many(const Pass& pass, int64_t groups) {
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  alignas(64) float first[M * kPanel];
  const char* weight = pass.begin();
  for (int64_t group = 0; group < groups; ++group, weight += kGroup * kPanel / 2 + kInt4ScaleBytes) {
    multiply_half<M, false>(pass, group, weight, first);
    multiply_half<M, true>(pass, group, weight, first);
  }
}

template <int M>
void tile_int4(const Pass& pass, int64_t groups) {
  if constexpr (M <= kFewRows) tile_int4_of_few<M>(pass, groups);
  else tile_int4_of_many<M>(pass, groups);
}

template <int M>
void multiply(const Pass& pass) {
  const int64_t k = pass.weight.k;
  switch (pass.weight.format) {
    case Format::kFloat32: return tile_plain<Ones, M>(pass, k);
    case Format::kBFloat16: return tile_plain<Pairs, M>(pass, k / 2);
    case Format::kInt8: return tile_int8<M>(pass, k / kGroup);
    case Format::kInt4: return tile_int4<M>(pass, k / kGroup);
    default: return;  // block formats: multiply_blocks
  }
}

template <int... M>
constexpr std::array<void (*)(const Pass&), sizeof...(M)> kernels_of(std::integer_sequence<int, M...>) {
  return {multiply<M + 1>...};
}
constexpr auto kDots = kernels_of(std::make_integer_sequence<int, kDotRows>());

}  // namespace outrider
