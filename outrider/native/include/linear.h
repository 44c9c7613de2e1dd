// Products of a few rows with a laid-out weight: y = x W^T.
//
// A panel of 32 outputs is read once for up to 12 rows; more take several passes over it, while the next panel comes from
// memory. Every row's sums run over k in one order, whatever rows stand beside it, so a row's result does not depend on
// the batch.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "operand.h"
#include "simd.h"
#include "weight.h"

namespace outrider {

constexpr int kMaxRows = 12;  // rows that one pass over a panel serves: 2 accumulators each, of 32 registers
// A pass that streams takes its weights in two strides, or it would wait for them where it keeps the arithmetic busy:
// from memory into the second cache far ahead, from there into the first a little ahead of where they are needed. In bytes.
constexpr int64_t kNear = 1024, kFar = 7168;  // the far one lies so much behind the near one

// Some rows with a panel.
struct Pass {
  const Weight& weight;
  int64_t panel;
  const Operand& x;
  int64_t row;        // the first
  const char* ahead;  // what is to be brought near meanwhile: 2 `ahead_step` bytes for 128 bytes of the panel
  int64_t ahead_step;
  bool streams;       // the pass that takes the panel from memory by itself
  float* tile;  // [rows, 32]

  const char* begin() const { return weight.panel(panel); }
  const char* chunk(int64_t index) const { return x.data + (index * x.rows + row) * kChunk; }
  void fetch(int64_t step) const {
    const char* from = ahead + 2 * step * ahead_step;
    if (streams) {
      _mm_prefetch(from + kFar, _MM_HINT_T1);
      _mm_prefetch(from + kFar + ahead_step, _MM_HINT_T1);
    }
    _mm_prefetch(from, _MM_HINT_T0);
    _mm_prefetch(from + ahead_step, _MM_HINT_T0);
  }
};

// sum += products of single numbers, or dot products of pairs or fours, in each 32 bits of w and x. Written out because
// compilers copy the sums about.
struct Ones {
  static void add(__m512& sum, __m512i w, __m512i x) {
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
  }
};
struct Pairs {
  static void add(__m512& sum, __m512i w, __m512i x) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
};
struct Fours {
  static void add(__m512i& sum, __m512i w, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
};

// One step of k: M rows, 32 outputs. x: the first row's; those of the others follow chunk by chunk
template <class Dot, int M, class Sum>
void step(Sum sum[M][2], __m512i w0, __m512i w1, const char* x) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    int32_t bits;
    std::memcpy(&bits, x + m * kChunk, 4);
    const __m512i all = _mm512_set1_epi32(bits);
    Dot::add(sum[m][0], w0, all);
    Dot::add(sum[m][1], w1, all);
  }
}

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

// The sums of a group begin with these, [rows].
template <int M>
[[gnu::always_inline]] inline void begin_group(const int32_t* offsets, __m512i sum[M][2]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    for (int z = 0; z < 2; ++z) {
      sum[m][z] = _mm512_set1_epi32(offsets[m]);
      asm("" : "+v"(sum[m][z]));  // a register each from the beginning, or compilers move them about in every step
    }
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
  const float* scales = pass.weight.scales + pass.panel * kPanel;
  const __m512 columns[2] = {load(scales), load(scales + kLanes)};
  for (int i = 0; i < 2 * M; ++i) {
    store(pass.tile + i * kLanes, _mm512_mul_ps(load(pass.tile + i * kLanes), columns[i % 2]));
  }
}

// int4 weights have scales of their own for each half of a group, and centres, which meet the sums of the rows' numbers.
// first: [M][32] for what the first half comes to before the row's scale, taken up by the second
template <int M, bool HIGH>
[[gnu::always_inline]] inline void add_half(const Pass& pass, int64_t group, const __m512i sum[M][2], const char* facts,
                                            float* first) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(facts) + HIGH * 2;
  const float* scales = pass.x.scales + group * pass.x.rows + pass.row;
  const uint32_t* sums = pass.x.sums + group * pass.x.rows + pass.row;
  float* tile = pass.tile;
#pragma GCC unroll 2
  for (int z = 0; z < 2; ++z, tile += kLanes, first += kLanes) {  // one after the other, for want of registers
    const __m512 column = _mm512_cvtph_ps(_mm256_loadu_si256(halves + z));
    const __m512i centres = _mm512_loadu_si512(facts + 2 * kPanel * 2 + z * 64);
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
  constexpr int64_t kLines = kGroup / 8, kFetches = kLines + kInt4Facts / 128;  // of 128 bytes, in a group
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
  for (int64_t i = kLines; HIGH && i < kFetches; ++i) pass.fetch(group * kFetches + i);
  add_half<M, HIGH>(pass, group, sum, weight + kLines * 128, first);
}

template <int M>
void tile_int4(const Pass& pass, int64_t groups) {
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  alignas(64) float first[M * kPanel];
  const char* weight = pass.begin();
  for (int64_t group = 0; group < groups; ++group, weight += kGroup * kPanel / 2 + kInt4Facts) {
    multiply_half<M, false>(pass, group, weight, first);
    multiply_half<M, true>(pass, group, weight, first);
  }
}

template <int M>
void multiply(const Pass& pass) {
  const int64_t k = pass.weight.k;
  switch (pass.weight.format) {
    case Format::kFloat32: return tile_plain<Ones, M>(pass, k);
    case Format::kBFloat16: return tile_plain<Pairs, M>(pass, k / 2);
    case Format::kInt8: return tile_int8<M>(pass, k / kGroup);
    case Format::kInt4: return tile_int4<M>(pass, k / kGroup);
  }
}

template <int... M>
constexpr std::array<void (*)(const Pass&), sizeof...(M)> kernels_of(std::integer_sequence<int, M...>) {
  return {multiply<M + 1>...};
}
constexpr auto kKernels = kernels_of(std::make_integer_sequence<int, kMaxRows>());

// One panel for all rows. epilogue(row, count, tile): takes [count][32] results of rows row .. row + count - 1.
//
// Up to 24 rows, the first pass takes as many as the memory leaves time for, the second the rest, while the next panel's
// beginning comes. More make passes of like size, of which the first two bring half of the next panel each.
template <class Epilogue>
void multiply_panel(const Weight& weight, int64_t panel, const Operand& x, int64_t rows, Epilogue&& epilogue) {
  alignas(64) float tile[kMaxRows * kPanel];
  const int64_t passes = (rows + kMaxRows - 1) / kMaxRows;
  const bool few = passes <= 2;
  for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
    const int64_t end = few ? std::min<int64_t>(rows, row + kMaxRows) : rows * (pass + 1) / passes;
    const int64_t count = end - row;
    const bool streams = few && pass == 0;  // takes its weights from memory
    const char* ahead = streams ? weight.panel(panel) + kNear
                                : weight.panel(panel + 1) + (few ? 0 : std::min<int64_t>(pass, 1) * weight.panel_bytes / 2);
    kKernels[count - 1](Pass{weight, panel, x, row, ahead, streams ? 64 : few ? 16 : 32, streams, tile});
    epilogue(row, count, tile);
    row = end;
  }
}

// The results of `multiply_panel`, with a bias if there is one, to where they belong in y: [rows, outputs].
template <class Y>
void store_panel(const Weight& weight, int64_t panel, int64_t row, int64_t count, const float* tile, const float* bias,
                 Y* y) {
  for (int z = 0; z < 2; ++z) {
    const int64_t n = panel * kPanel + z * kLanes;
    const __mmask16 mask = lanes(weight.outputs - n);
    for (int64_t m = 0; m < count; ++m) {
      __m512 value = load(tile + m * kPanel + z * kLanes);
      if (bias) value = _mm512_add_ps(value, load(bias + n, mask));
      store(y + (row + m) * weight.outputs + n, value, mask);
    }
  }
}

}  // namespace outrider
