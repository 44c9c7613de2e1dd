// Products of a few rows with a panel of a block format, by AVX2: the sums are the whole numbers that they are with AVX-512.
//
// Values of up to 6 bits: pairs of products of bytes add up to 16 bits, without overflow over a stretch of lines: eight of 15 x
// 127, four of 31 x 127 or two of 63 x 127. Values of 8 bits: even and odd numbers of k apart, as 16 bits.
#pragma once

#include "products/block_pass.h"
#include "dot_steps.h"

namespace outrider {

using BlockRun = BlockRunOf<kEight>;

// Values of a line's four k of a vector's outputs, of the group's first or last 32 k. LINE: known if there are upper bits
template <Format FORMAT, bool HIGH, int LINE>
[[gnu::always_inline]] inline __m256i load_values(const char* values, int64_t line, int vector) {
  using T = BlockTraits<FORMAT>;
  const __m256i both = load_vector(values + line * kLine + vector * 32);
  const __m256i lower = _mm256_and_si256(HIGH ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
  if constexpr (T::kUpper == 0) {
    return lower;
  } else {
    constexpr int kPosition = upper_position(T::kFormat, LINE);
    const __m256i plane = load_vector(values + upper_offset(T::kFormat, LINE, HIGH) + vector * 32);
    const __m256i there = kPosition < 4 ? _mm256_slli_epi16(plane, 4 - kPosition) : _mm256_srli_epi16(plane, kPosition - 4);
    return _mm256_or_si256(lower, _mm256_and_si256(there, _mm256_set1_epi8(((1 << T::kUpper) - 1) << 4)));
  }
}

// A stretch of lines: products of bytes, added up to 32 bits. whole: sums of the stretches before
template <Format FORMAT, int M, int V, bool HIGH, int STRETCH>
[[gnu::always_inline]] inline void multiply_stretch(const BlockRun& run, const char* x, __m256i whole[M][V]) {
  using T = BlockTraits<FORMAT>;
  constexpr int kBegin = STRETCH * T::kStretch;
  __m256i sum[M][V];
  auto line = [&](auto known, int64_t i, auto first) INLINED {
    run.template fetch<FORMAT, V>(8 * HIGH + i);
    __m256i w[V];
    each<V>([&](auto v) INLINED { w[v] = load_values<FORMAT, HIGH, known>(run.place.values, i, run.first + v); });
    each<M>([&](auto m) INLINED {
      const __m256i all = broadcast_word(x + 4 * i + m * bytes_of_chunk(FORMAT));
      each<V>([&](auto v) INLINED { first ? set_bytes(sum[m][v], w[v], all) : add_bytes(sum[m][v], w[v], all); });
    });
  };
  if constexpr (T::kUpper == 0) {
    line(std::integral_constant<int, 0>(), kBegin, std::true_type());
    hold<M, V>(sum);
#pragma GCC unroll 1
    for (int64_t i = kBegin + 1; i < kBegin + T::kStretch; ++i) line(std::integral_constant<int, 0>(), i, std::false_type());
  } else {
    each<T::kStretch>([&](auto i) INLINED {
      line(std::integral_constant<int, kBegin + i>(), kBegin + i, std::bool_constant<i == 0>());
    });
  }
  hold<M, V>(sum);
  const __m256i ones = _mm256_set1_epi16(1);
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { whole[m][v] = _mm256_add_epi32(whole[m][v], _mm256_madd_epi16(sum[m][v], ones)); });
  });
}

// A part of values of 8 bits.
template <Format FORMAT, int M, int V, bool HIGH>
[[gnu::always_inline]] inline void multiply_wide(const BlockRun& run, const char* x, __m256i whole[M][V]) {
  const __m256i low = _mm256_set1_epi32(0x00FF00FF);
  const char* from = run.place.values + HIGH * 8 * kLine + run.first * 32;
  auto add = [](__m256i sum[M][V], const __m256i w[V], const char* x) INLINED {
    each<M>([&](auto m) INLINED {
      const __m256i all = broadcast_word(x + m * bytes_of_chunk(FORMAT));
      each<V>([&](auto v) INLINED { add_products(sum[m][v], w[v], all); });
    });
  };
  hold<M, V>(whole);
#pragma GCC unroll 1
  for (int64_t i = 8 * HIGH; i < 8 * HIGH + 8; ++i, from += kLine) {
    run.template fetch<FORMAT, V>(i);
    __m256i w[V];
    each<V>([&](auto v) INLINED { w[v] = _mm256_and_si256(load_vector(from + v * 32), low); });
    add(whole, w, x + 8 * i);
    const char* again = once_more(from);
    each<V>([&](auto v) INLINED { w[v] = _mm256_srli_epi16(load_vector(again + v * 32), 8); });
    add(whole, w, x + 8 * i + 4);
  }
  hold<M, V>(whole);
}

// Scales (kind 0) or minima (kind 1) of a part's blocks, of a vector's outputs, as float32.
template <Format FORMAT>
[[gnu::always_inline]] inline __m256 block_numbers(const GroupPlace& place, int kind, int part, int vector) {
  using T = BlockTraits<FORMAT>;
  auto halves = [](const char* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); };
  const char* from = T::numbers(place, kind, part);
  if constexpr (!T::kFormat.units) {
    return halves(from + vector * kEight * 2);
  } else {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + vector * kEight));
    const __m256i whole = T::kFormat.affine() ? _mm256_cvtepu8_epi32(bytes) : _mm256_cvtepi8_epi32(bytes);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(whole), halves(place.units + (kind * kPanel + vector * kEight) * 2));
  }
}

// A part, added to the parts before it in so_far, or with these to the tile.
template <Format FORMAT, int M, int V, int PART>
[[gnu::always_inline]] inline void multiply_part(const BlockRun& run, __m256 so_far[M][V]) {
  using T = BlockTraits<FORMAT>;
  const Operand& operand = run.pass.x;
  const int64_t at = T::sums_at(run.pass, run.place, PART);
  const char* x = run.pass.chunk(run.place.index);
  __m256i whole[M][V];
  each<M>([&](auto m) INLINED {
    const __m256i begin = T::kFormat.affine() ? _mm256_setzero_si256() : _mm256_set1_epi32(operand.offsets[at + m]);
    each<V>([&](auto v) INLINED { whole[m][v] = begin; });
  });
  if constexpr (T::kFormat.bits == 8) {
    multiply_wide<FORMAT, M, V, PART % 2>(run, x, whole);
  } else {
    each<T::kStretches>([&](auto s) INLINED {
      constexpr int kStretch = PART / 2 * T::kStretches + s;
      multiply_stretch<FORMAT, M, V, PART % 2, kStretch>(run, x + PART % 2 * kGroup / 2, whole);
    });
  }
  const float* scales = operand.scales + run.place.index * operand.rows + run.pass.row;
  each<V>([&](auto v) INLINED {
    const __m256 scale = block_numbers<FORMAT>(run.place, 0, PART, run.first + v);
    const __m256 minimum = T::kFormat.affine() ? block_numbers<FORMAT>(run.place, 1, PART, run.first + v) : scale;
    each<M>([&](auto m) INLINED {
      const __m256 real = _mm256_cvtepi32_ps(whole[m][v]);
      __m256 all = PART == 0 ? _mm256_mul_ps(real, scale) : _mm256_fmadd_ps(real, scale, so_far[m][v]);
      if constexpr (T::kFormat.affine()) all = _mm256_fmadd_ps(minimum, _mm256_set1_ps(operand.block_sums[at + m]), all);
      if constexpr (PART < T::kParts - 1) {
        so_far[m][v] = all;
      } else {
        const __m256 before = _mm256_loadu_ps(run.tile(m, v));
        _mm256_storeu_ps(run.tile(m, v), _mm256_fmadd_ps(all, _mm256_set1_ps(scales[m]), before));
      }
    });
  });
}

template <Format FORMAT, int M, int V>
[[gnu::noinline]] void run_blocks(const BlockRun& run) {
  __m256 so_far[M][V];
  each<BlockTraits<FORMAT>::kParts>([&](auto part) INLINED { multiply_part<FORMAT, M, V, part>(run, so_far); });
  for (int64_t i = 16; i < BlockTraits<FORMAT>::kFetches; ++i) run.template fetch<FORMAT, V>(i);
}

template <Format FORMAT, int M>
void multiply_blocks(const Pass& pass) {
  constexpr int V = M <= 2 ? 4 : 2;
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  each_group<FORMAT>(pass, [&](const GroupPlace& place) {
    for (int first = 0; first < kPanel / kEight; first += V) run_blocks<FORMAT, M, V>(BlockRun{pass, place, first});
  });
}

}  // namespace outrider
