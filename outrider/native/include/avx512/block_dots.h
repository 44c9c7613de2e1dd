// Products of a few rows with a panel of a block format, by dot products of bytes.
#pragma once

#include <utility>

#include "products/block_pass.h"
#include "dot_steps.h"

namespace outrider {

// The upper bits of a stretch of lines, of one half: bits 4 and up of a byte are those of the next line. Z: vectors of 16
// outputs, from `z` on
template <Format FORMAT, int Z, bool HIGH>
struct UpperBits {
  using T = BlockTraits<FORMAT>;
  __m512i bits[Z];

  [[gnu::always_inline]] UpperBits(const char* values, int stretch, int z) {
    if constexpr (T::kUpper > 0) {
      const char* from = values + upper_offset(T::kFormat, stretch * T::kStretch, HIGH) + z * 64;
      for (int i = 0; i < Z; ++i) {
        bits[i] = _mm512_loadu_si512(from + i * 64);
        if (stretch % 2) bits[i] = _mm512_slli_epi16(bits[i], 4);
      }
    }
  }
  // Joined with a line's lower bits.
  [[gnu::always_inline]] void join(__m512i lower[Z]) {
    if constexpr (T::kUpper > 0) {
      constexpr int kOr = 0xF8;  // a | b & c
      const __m512i mask = _mm512_set1_epi8(((1 << T::kUpper) - 1) << 4);
      for (int i = 0; i < Z; ++i) {
        lower[i] = _mm512_ternarylogic_epi32(lower[i], bits[i], mask, kOr);
        bits[i] = _mm512_srli_epi16(bits[i], T::kUpper);
      }
    }
  }
};

// A step of k: M rows, Z vectors of 16 outputs, in the group's first or last 32 k. x: the first row's four numbers
template <Format FORMAT, int M, int Z, bool HIGH>
[[gnu::always_inline]] inline void multiply_line(const char* values, int64_t line, int z, UpperBits<FORMAT, Z, HIGH>& upper,
                                                 const char* x, __m512i sum[M][Z]) {
  __m512i w[Z];
  for (int i = 0; i < Z; ++i) {
    if constexpr (BlockTraits<FORMAT>::kFormat.bits == 8) {
      w[i] = _mm512_loadu_si512(values + (HIGH * 8 + line) * 128 + (z + i) * 64);
    } else {
      const __m512i both = _mm512_loadu_si512(values + line * 128 + (z + i) * 64);
      w[i] = _mm512_and_si512(HIGH ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
    }
  }
  upper.join(w);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    int32_t bits;
    std::memcpy(&bits, x + m * kChunk, 4);
    const __m512i all = _mm512_set1_epi32(bits);
#pragma GCC unroll 2
    for (int i = 0; i < Z; ++i) Fours::add(sum[m][i], w[i], all);
  }
}

template <int M, int Z>
[[gnu::always_inline]] inline void hold_sums(__m512i sum[M][Z]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int i = 0; i < Z; ++i) asm("" : "+v"(sum[m][i]));
  }
}

// A part's sums begin with the corrections for the format's zero.
template <Format FORMAT, int M, int Z>
[[gnu::always_inline]] inline void begin_part(const Pass& pass, const GroupPlace& place, int part, __m512i sum[M][Z]) {
  using T = BlockTraits<FORMAT>;
  const int32_t* offsets = pass.x.offsets + T::sums_at(pass, place, part);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const __m512i begin = T::kFormat.affine() ? _mm512_setzero_si512() : _mm512_set1_epi32(offsets[m]);
#pragma GCC unroll 2
    for (int i = 0; i < Z; ++i) sum[m][i] = begin;
  }
  hold_sums<M, Z>(sum);
}

// Scales (kind 0) or minima (kind 1) of a part's blocks, of 16 outputs, as float32.
template <Format FORMAT>
[[gnu::always_inline]] inline __m512 block_numbers(const GroupPlace& place, int kind, int part, int z) {
  constexpr BlockFormat kFormat = BlockTraits<FORMAT>::kFormat;
  const char* from = BlockTraits<FORMAT>::numbers(place, kind, part);
  if constexpr (!kFormat.units) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + z));
  } else {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + z);
    const __m512i whole = kFormat.affine() ? _mm512_cvtepu8_epi32(bytes) : _mm512_cvtepi8_epi32(bytes);
    const __m512 unit = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(place.units) + kind * 2 + z));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(whole), unit);
  }
}

// What a part comes to, before the row's scale, added to the parts before it.
template <Format FORMAT, int M, int Z, int PART>
[[gnu::always_inline]] inline void add_part(const Pass& pass, const GroupPlace& place, int z, const __m512i sum[M][Z],
                                            __m512 so_far[M][Z]) {
  constexpr bool kAffine = BlockTraits<FORMAT>::kFormat.affine();
  const float* block_sums = pass.x.block_sums + BlockTraits<FORMAT>::sums_at(pass, place, PART);
#pragma GCC unroll 2
  for (int i = 0; i < Z; ++i) {
    const __m512 scale = block_numbers<FORMAT>(place, 0, PART, z + i);
    const __m512 minimum = kAffine ? block_numbers<FORMAT>(place, 1, PART, z + i) : scale;
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const __m512 real = _mm512_cvtepi32_ps(sum[m][i]);
      __m512 all = PART == 0 ? _mm512_mul_ps(real, scale) : _mm512_fmadd_ps(real, scale, so_far[m][i]);
      if constexpr (kAffine) all = _mm512_fmadd_ps(minimum, _mm512_set1_ps(block_sums[m]), all);
      so_far[m][i] = all;
    }
  }
}

// A group's lines prefetch one after the other.
template <Format FORMAT, int Z>
[[gnu::always_inline]] inline void fetch_line(const Pass& pass, const GroupPlace& place, int64_t i, int z) {
  if (i >= BlockTraits<FORMAT>::kFetches) return;
  if (Z == 2) pass.fetch(place.line + i);
  else pass.fetch_half(place.line + i, z);
}

// A run of few rows: its two parts in one loop, because their sums have room in registers.
template <Format FORMAT, int M, int RUN>
[[gnu::always_inline]] inline void multiply_both(const Pass& pass, const GroupPlace& place, __m512 so_far[M][2]) {
  using T = BlockTraits<FORMAT>;
  __m512i low[M][2], high[M][2];
  begin_part<FORMAT, M, 2>(pass, place, 2 * RUN, low);
  begin_part<FORMAT, M, 2>(pass, place, 2 * RUN + 1, high);
  const char* x = pass.chunk(place.index) + RUN * T::kLines * 4;
  int64_t line = RUN * T::kLines;
#pragma GCC unroll 2
  for (int stretch = RUN * T::kStretches; stretch < (RUN + 1) * T::kStretches; ++stretch) {
    UpperBits<FORMAT, 2, false> first(place.values, stretch, 0);
    UpperBits<FORMAT, 2, true> last(place.values, stretch, 0);
#pragma GCC unroll 1
    for (int i = 0; i < T::kStretch; ++i, ++line, x += 4) {
      fetch_line<FORMAT, 2>(pass, place, line, 0);
      fetch_line<FORMAT, 2>(pass, place, 8 + line, 0);
      multiply_line<FORMAT, M, 2, false>(place.values, line, 0, first, x, low);
      multiply_line<FORMAT, M, 2, true>(place.values, line, 0, last, x + kChunk / 2, high);
    }
  }
  hold_sums<M, 2>(low), hold_sums<M, 2>(high);
  add_part<FORMAT, M, 2, 2 * RUN>(pass, place, 0, low, so_far);
  add_part<FORMAT, M, 2, 2 * RUN + 1>(pass, place, 0, high, so_far);
}

// A part. To the same bits.
template <Format FORMAT, int M, int Z, int PART>
[[gnu::always_inline]] inline void multiply_part(const Pass& pass, const GroupPlace& place, int z, __m512 so_far[M][Z]) {
  using T = BlockTraits<FORMAT>;
  constexpr int kRun = PART / 2;
  constexpr bool kHigh = PART % 2;
  __m512i sum[M][Z];
  begin_part<FORMAT, M, Z>(pass, place, PART, sum);
  const char* x = pass.chunk(place.index) + kHigh * kChunk / 2 + kRun * T::kLines * 4;
  int64_t line = kRun * T::kLines;
#pragma GCC unroll 2
  for (int stretch = kRun * T::kStretches; stretch < (kRun + 1) * T::kStretches; ++stretch) {
    UpperBits<FORMAT, Z, kHigh> upper(place.values, stretch, z);
#pragma GCC unroll 1
    for (int i = 0; i < T::kStretch; ++i, ++line, x += 4) {
      fetch_line<FORMAT, Z>(pass, place, 8 * kHigh + line, z);
      multiply_line<FORMAT, M, Z, kHigh>(place.values, line, z, upper, x, sum);
    }
  }
  hold_sums<M, Z>(sum);
  add_part<FORMAT, M, Z, PART>(pass, place, z, sum, so_far);
}

// tile += what a group comes to, times the rows' scales.
template <int M, int Z>
[[gnu::always_inline]] inline void add_to_tile(const Pass& pass, const GroupPlace& place, int z, const __m512 so_far[M][Z]) {
  const float* scales = pass.x.scales + place.index * pass.x.rows + pass.row;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const __m512 scale = _mm512_set1_ps(scales[m]);
#pragma GCC unroll 2
    for (int i = 0; i < Z; ++i) {
      float* to = pass.tile + m * kPanel + (z + i) * kLanes;
      store(to, _mm512_fmadd_ps(so_far[m][i], scale, load(to)));
    }
  }
}

// Vectors of outputs at a time, of many rows. With both of a panel, what the parts come to waits in memory: with four parts
// a group that takes longer than to load every number of the rows twice.
constexpr int vectors_at_a_time(Format format) { return block_format(format).parts() == 4 ? 1 : 2; }

template <Format FORMAT, int M>
[[gnu::noinline]] void tile_blocks(const Pass& pass) {
  using T = BlockTraits<FORMAT>;
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  each_group<FORMAT>(pass, [&](const GroupPlace& place) __attribute__((always_inline)) {
    constexpr int Z = M <= kFewRows ? 2 : vectors_at_a_time(FORMAT);
#pragma GCC unroll 1
    for (int z = 0; z < 2; z += Z) {
      __m512 so_far[M][Z];
      if constexpr (M <= kFewRows) {
        multiply_both<FORMAT, M, 0>(pass, place, so_far);
        if constexpr (T::kRuns == 2) multiply_both<FORMAT, M, 1>(pass, place, so_far);
      } else {
        multiply_part<FORMAT, M, Z, 0>(pass, place, z, so_far);
        multiply_part<FORMAT, M, Z, 1>(pass, place, z, so_far);
        if constexpr (T::kRuns == 2) {
          multiply_part<FORMAT, M, Z, 2>(pass, place, z, so_far);
          multiply_part<FORMAT, M, Z, 3>(pass, place, z, so_far);
        }
      }
      for (int64_t i = 16; i < T::kFetches; ++i) fetch_line<FORMAT, Z>(pass, place, i, z);
      add_to_tile<M, Z>(pass, place, z, so_far);
    }
  });
}

template <Format FORMAT, int M>
void multiply_blocks(const Pass& pass) {
  tile_blocks<FORMAT, M>(pass);
}

}  // namespace outrider
