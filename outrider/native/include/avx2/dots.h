// Products of a few rows with a panel, by AVX2, which has half the registers of AVX-512, of half the width: a run computes two
// of the panel's four vectors of eight outputs for up to six rows, or all four for up to two. Runs cover a block of k, so
// that the panel is read once from start to end; the tile accumulates their sums.
//
// Every row's sums run over k in a fixed order, so a row's result does not depend on the batch.
#pragma once

#include <array>
#include <utility>

#include "dot_steps.h"

namespace outrider {

// --- float32 and bfloat16 ---

// A step of k: x: the first row's number; those of the others follow chunk by chunk
template <int M, int V>
[[gnu::always_inline]] inline void step(__m256 sum[M][V], const __m256 w[V], const char* x) {
  each<M>([&](auto m) INLINED {
    const __m256 all = broadcast(x + m * bytes_of_chunk(Format::kFloat32));
    each<V>([&](auto v) INLINED { add_product(sum[m][v], w[v], all); });
  });
}

// float32, a number of k a line, and bfloat16, two of them, which are widened one after the other.
template <Format FORMAT, int M, int V>
[[gnu::noinline]] void run_plain(Run run) {
  constexpr int64_t kNumbers = FORMAT == Format::kFloat32 ? 1 : 2, kBlock = block_of(FORMAT);
  constexpr int64_t kSteps = bytes_of_chunk(FORMAT) / (4 * kNumbers);  // of a chunk
  const __m256i high = _mm256_set1_epi32(int32_t(0xFFFF0000));
  __m256 sum[M][V];
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { sum[m][v] = _mm256_loadu_ps(run.tile(m, v)); });
  });
  const int64_t lines = std::min(kBlock, run.pass.weight.k - run.block * kBlock) / kNumbers;
  const char* from = run.weight;
  for (int64_t line = 0; line < lines; run.x += run.jump) {
    const int64_t end = std::min(lines, line + kSteps);
    const char* x = run.x;
#pragma GCC unroll 1
    for (; line < end; ++line, from += kLine, x += 4 * kNumbers) {
      run.template fetch<V>(line);
      __m256 w[V];
      if constexpr (FORMAT == Format::kFloat32) {
        each<V>([&](auto v) INLINED { w[v] = _mm256_castsi256_ps(load_vector(from + v * 32)); });
        step<M, V>(sum, w, x);
      } else {
        each<V>([&](auto v) INLINED { w[v] = _mm256_castsi256_ps(_mm256_slli_epi32(load_vector(from + v * 32), 16)); });
        step<M, V>(sum, w, x);
        const char* again = once_more(from);
        each<V>([&](auto v) INLINED { w[v] = _mm256_castsi256_ps(_mm256_and_si256(load_vector(again + v * 32), high)); });
        step<M, V>(sum, w, x + 4);
      }
    }
  }
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { _mm256_storeu_ps(run.tile(m, v), sum[m][v]); });
  });
}

// --- int8: even and odd numbers of k apart, as 16 bits, so that nothing saturates: sums are the whole numbers that they are ---

template <int M, int V>
[[gnu::noinline]] void run_int8(const Run& run) {
  constexpr int64_t kLines = kGroup / 4;
  const __m256i low = _mm256_set1_epi32(0x00FF00FF);
  const int64_t index = run.block * run.pass.x.rows + run.pass.row;
  auto add = [](__m256i sum[M][V], const __m256i w[V], const char* x) [[gnu::always_inline]] {
    each<M>([&](auto m) INLINED {
      const __m256i all = broadcast_word(x + m * bytes_of_chunk(Format::kInt8));
      each<V>([&](auto v) INLINED { add_products(sum[m][v], w[v], all); });
    });
  };
  const int32_t* offsets = run.pass.x.offsets + index;
  __m256i sum[M][V];
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { sum[m][v] = _mm256_set1_epi32(offsets[m]); });
  });
  const char *from = run.weight, *x = run.x;
#pragma GCC unroll 1
  for (int64_t i = 0; i < kLines; ++i, from += kLine, x += 8) {
    run.template fetch<V>(i);
    __m256i w[V];
    each<V>([&](auto v) INLINED { w[v] = _mm256_and_si256(load_vector(from + v * 32), low); });
    add(sum, w, x);
    const char* again = once_more(from);
    each<V>([&](auto v) INLINED { w[v] = _mm256_srli_epi16(load_vector(again + v * 32), 8); });
    add(sum, w, x + 4);
  }
  const float* scales = run.pass.x.scales + index;
  each<M>([&](auto m) INLINED {
    const __m256 scale = _mm256_set1_ps(scales[m]);
    each<V>([&](auto v) INLINED {
      const __m256 before = _mm256_loadu_ps(run.tile(m, v));
      _mm256_storeu_ps(run.tile(m, v), _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[m][v]), scale, before));
    });
  });
}

// --- int4 ---

// What half a group comes to: whole numbers in sum, times the half's scales, plus its centres times the sum of the row's
// numbers. first: what the first half comes to before the row's scale, taken up by the second
template <int M, int V, bool HIGH>
[[gnu::always_inline]] inline void add_half(const Run& run, const __m256i sum[M][V], __m256 first[M][V]) {
  const Operand& operand = run.pass.x;
  const int64_t at = run.block * operand.rows + run.pass.row;
  const int32_t* offsets = operand.offsets + (2 * run.block + HIGH) * operand.rows + run.pass.row;
  const char* scale_bytes = run.weight - run.first * 32 + kGroup / 8 * kLine;
  const __m256i ones = _mm256_set1_epi16(1);
  each<V>([&](auto v) INLINED {
    const char* halves = scale_bytes + (HIGH * kPanel + (run.first + v) * kEight) * 2;
    const __m256 column = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
    const __m256i centres = load_vector(scale_bytes + 2 * kPanel * 2 + (run.first + v) * 32);
    const __m256i high = _mm256_set1_epi32(int32_t(0xFFFF0000));
    const __m256 centre[2] = {_mm256_castsi256_ps(_mm256_slli_epi32(centres, 16)),
                              _mm256_castsi256_ps(_mm256_and_si256(centres, high))};
    each<M>([&](auto m) INLINED {
      const __m256i whole = _mm256_add_epi32(_mm256_madd_epi16(sum[m][v], ones), _mm256_set1_epi32(offsets[m]));
      const __m256 real = _mm256_cvtepi32_ps(whole);
      if constexpr (!HIGH) {
        first[m][v] = _mm256_mul_ps(real, column);
      } else {
        const uint32_t sums = operand.sums[at + m];  // as bfloat16
        const __m256 both = _mm256_fmadd_ps(real, column, first[m][v]);
        __m256 all = _mm256_fmadd_ps(both, _mm256_set1_ps(operand.scales[at + m]), _mm256_loadu_ps(run.tile(m, v)));
        all = _mm256_fmadd_ps(centre[0], _mm256_castsi256_ps(_mm256_set1_epi32(int32_t(sums << 16))), all);
        all = _mm256_fmadd_ps(centre[1], _mm256_castsi256_ps(_mm256_set1_epi32(int32_t(sums & 0xFFFF0000))), all);
        _mm256_storeu_ps(run.tile(m, v), all);
      }
    });
  });
}

// 32 k of a group, the low or the high halves of its bytes. Pairs of products, 15 x 127 at most each, add up to 16 bits
// without overflow over all of them.
template <int M, int V, bool HIGH>
[[gnu::always_inline]] inline void multiply_half(const Run& run, __m256 first[M][V]) {
  constexpr int64_t kLines = kGroup / 8, kScaleLines = kInt4ScaleBytes / kLine;
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i sum[M][V];
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { sum[m][v] = _mm256_setzero_si256(); });
  });
  hold<M, V>(sum);
  const char *from = run.weight, *x = run.x + HIGH * kGroup / 2;
#pragma GCC unroll 1
  for (int64_t i = 0; i < kLines; ++i, from += kLine, x += 4) {
    if (!HIGH) run.template fetch<V>(i);
    __m256i w[V];
    each<V>([&](auto v) INLINED {
      const __m256i both = load_vector(from + v * 32);
      w[v] = _mm256_and_si256(HIGH ? _mm256_srli_epi16(both, 4) : both, nibble);
    });
    each<M>([&](auto m) INLINED {
      const __m256i all = broadcast_word(x + m * bytes_of_chunk(Format::kInt4));
      each<V>([&](auto v) INLINED { add_bytes(sum[m][v], w[v], all); });
    });
  }
  hold<M, V>(sum);
  for (int64_t i = 0; HIGH && i < kScaleLines; ++i) run.template fetch<V>(kLines + i);
  add_half<M, V, HIGH>(run, sum, first);
}

template <int M, int V>
[[gnu::noinline]] void run_int4(const Run& run) {
  __m256 first[M][V];
  multiply_half<M, V, false>(run, first);
  multiply_half<M, V, true>(run, first);
}

// --- all of them ---

template <int M, int V>
void multiply_block(const Run& run) {
  switch (run.pass.weight.format) {
    case Format::kFloat32: return run_plain<Format::kFloat32, M, V>(run);
    case Format::kBFloat16: return run_plain<Format::kBFloat16, M, V>(run);
    case Format::kInt8: return run_int8<M, V>(run);
    case Format::kInt4: return run_int4<M, V>(run);
    default: return;  // block formats: multiply_blocks
  }
}

template <int M>
void multiply(const Pass& pass) {
  constexpr int V = M <= 2 ? 4 : 2;
  multiply_in_runs<M, V, kEight>(pass, [](const Run& run) INLINED { multiply_block<M, V>(run); });
}

template <int... M>
constexpr std::array<void (*)(const Pass&), sizeof...(M)> kernels_of(std::integer_sequence<int, M...>) {
  return {multiply<M + 1>...};
}
constexpr auto kDots = kernels_of(std::make_integer_sequence<int, kDotRows>());

}  // namespace outrider
