// Products of a few rows with a panel of a block format, by dot products of bytes.
#pragma once

#include <utility>

#include "block_pass.h"
#include "dot_steps.h"

namespace outrider {

// The upper bits of a stretch of lines, of one half: bits 4 and up of a byte are those of the next line.
template <Format FORMAT, bool HIGH>
struct UpperBits {
  using T = BlockTraits<FORMAT>;
  __m512i bits[2];

  [[gnu::always_inline]] UpperBits(const char* values, int stretch) {
    if constexpr (T::kUpper > 0) {
      const char* from = values + upper_offset(T::kFormat, stretch * T::kStretch, HIGH);
      for (int z = 0; z < 2; ++z) {
        bits[z] = _mm512_loadu_si512(from + z * 64);
        if (stretch % 2) bits[z] = _mm512_slli_epi16(bits[z], 4);
      }
    }
  }
  // Joined with a line's lower bits.
  [[gnu::always_inline]] void join(__m512i lower[2]) {
    if constexpr (T::kUpper > 0) {
      constexpr int kOr = 0xF8;  // a | b & c
      const __m512i mask = _mm512_set1_epi8(((1 << T::kUpper) - 1) << 4);
      for (int z = 0; z < 2; ++z) {
        lower[z] = _mm512_ternarylogic_epi32(lower[z], bits[z], mask, kOr);
        bits[z] = _mm512_srli_epi16(bits[z], T::kUpper);
      }
    }
  }
};

// Values of a line's four k of 32 outputs, in the group's first or last 32 k.
template <Format FORMAT, bool HIGH>
[[gnu::always_inline]] inline void load_values(const char* values, int64_t line, UpperBits<FORMAT, HIGH>& upper, __m512i to[2]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int z = 0; z < 2; ++z) {
    if constexpr (BlockTraits<FORMAT>::kFormat.bits == 8) {
      to[z] = _mm512_loadu_si512(values + (HIGH * 8 + line) * 128 + z * 64);
    } else {
      const __m512i both = _mm512_loadu_si512(values + line * 128 + z * 64);
      to[z] = _mm512_and_si512(HIGH ? _mm512_srli_epi16(both, 4) : both, nibble);
    }
  }
  upper.join(to);
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

// A part's sums begin with the corrections for the format's zero.
template <Format FORMAT, int M>
[[gnu::always_inline]] inline void begin_part(const Pass& pass, const GroupPlace& place, int part, __m512i sum[M][2]) {
  using T = BlockTraits<FORMAT>;
  if constexpr (T::kFormat.affine()) {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_si512();
    hold<M>(sum);
  } else {
    begin_group<M>(pass.x.offsets + T::sums_at(pass, place, part), sum);
  }
}

// What a part comes to, added to the parts before it: before the row's scale. z: which 16 outputs; so_far: [M], with STRIDE
template <Format FORMAT, int M, int PART>
[[gnu::always_inline]] inline void add_part(const Pass& pass, const GroupPlace& place, int z, const __m512i sum[M][2],
                                            __m512 so_far[M]) {
  constexpr BlockFormat kFormat = BlockTraits<FORMAT>::kFormat;
  const __m512 scale = block_numbers<FORMAT>(place, 0, PART, z);
  const float* sums = pass.x.block_sums + BlockTraits<FORMAT>::sums_at(pass, place, PART);
  __m512 minimum = _mm512_setzero_ps();
  if constexpr (kFormat.affine()) minimum = block_numbers<FORMAT>(place, 1, PART, z);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const __m512 real = _mm512_cvtepi32_ps(sum[m][z]);
    so_far[m] = PART == 0 ? _mm512_mul_ps(real, scale) : _mm512_fmadd_ps(real, scale, so_far[m]);
    if constexpr (kFormat.affine()) so_far[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[m]), so_far[m]);
  }
}

// The I-th of a group's lines prefetches; with both halves in one loop, two or more of them.
template <Format FORMAT>
[[gnu::always_inline]] inline void fetch_line(const Pass& pass, const GroupPlace& place, int64_t i) {
  if (i < BlockTraits<FORMAT>::kFetches) pass.fetch(place.line + i);
}

// Of few rows: both halves in one loop, and nothing waits in memory between groups.
template <Format FORMAT, int M>
struct FewRows {
  using T = BlockTraits<FORMAT>;
  const Pass& pass;
  __m512 tile[M][2], so_far[2][M];

  [[gnu::always_inline]] explicit FewRows(const Pass& pass) : pass(pass) {
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) tile[m][0] = tile[m][1] = _mm512_setzero_ps();
  }
  template <int RUN>
  [[gnu::always_inline]] void run(const GroupPlace& place) {
    __m512i low[M][2], high[M][2];
    begin_part<FORMAT, M>(pass, place, 2 * RUN, low);
    begin_part<FORMAT, M>(pass, place, 2 * RUN + 1, high);
    const char* x = pass.chunk(place.index) + RUN * T::kLines * 4;
    int64_t line = RUN * T::kLines;
#pragma GCC unroll 2
    for (int stretch = 0; stretch < T::kStretches; ++stretch) {
      UpperBits<FORMAT, false> first(place.values, RUN * T::kStretches + stretch);
      UpperBits<FORMAT, true> last(place.values, RUN * T::kStretches + stretch);
#pragma GCC unroll 1
      for (int i = 0; i < T::kStretch; ++i, ++line, x += 4) {
        fetch_line<FORMAT>(pass, place, line);
        fetch_line<FORMAT>(pass, place, 8 + line);
        __m512i w[2];
        load_values<FORMAT, false>(place.values, line, first, w);
        step<Fours, M>(low, w[0], w[1], x);
        load_values<FORMAT, true>(place.values, line, last, w);
        step<Fours, M>(high, w[0], w[1], x + kChunk / 2);
      }
    }
    hold<M>(low), hold<M>(high);
#pragma GCC unroll 2
    for (int z = 0; z < 2; ++z) {
      add_part<FORMAT, M, 2 * RUN>(pass, place, z, low, so_far[z]);
      add_part<FORMAT, M, 2 * RUN + 1>(pass, place, z, high, so_far[z]);
    }
  }
  [[gnu::always_inline]] void group(const GroupPlace& place) {
    run<0>(place);
    if constexpr (T::kRuns == 2) run<1>(place);
    for (int64_t i = 16; i < T::kFetches; ++i) pass.fetch(place.line + i);
    const float* scales = pass.x.scales + place.index * pass.x.rows + pass.row;
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m512 scale = _mm512_set1_ps(scales[m]);
      for (int z = 0; z < 2; ++z) tile[m][z] = _mm512_fmadd_ps(so_far[z][m], scale, tile[m][z]);
    }
  }
  [[gnu::always_inline]] void finish() const {
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      store(pass.tile + m * kPanel, tile[m][0]);
      store(pass.tile + m * kPanel + kLanes, tile[m][1]);
    }
  }
};

// Of many rows: part after part, because the sums of both halves would not fit into the registers. To the same bits.
template <Format FORMAT, int M>
struct ManyRows {
  using T = BlockTraits<FORMAT>;
  const Pass& pass;
  alignas(64) float so_far[2][M][kLanes];

  explicit ManyRows(const Pass& pass) : pass(pass) { std::memset(pass.tile, 0, M * kPanel * sizeof(float)); }

  template <int RUN, bool HIGH>
  [[gnu::always_inline]] void part(const GroupPlace& place) {
    constexpr int kPart = 2 * RUN + HIGH;
    __m512i sum[M][2];
    begin_part<FORMAT, M>(pass, place, kPart, sum);
    const char* x = pass.chunk(place.index) + HIGH * kChunk / 2 + RUN * T::kLines * 4;
    int64_t line = RUN * T::kLines;
#pragma GCC unroll 2
    for (int stretch = 0; stretch < T::kStretches; ++stretch) {
      UpperBits<FORMAT, HIGH> upper(place.values, RUN * T::kStretches + stretch);
#pragma GCC unroll 1
      for (int i = 0; i < T::kStretch; ++i, ++line, x += 4) {
        fetch_line<FORMAT>(pass, place, 8 * HIGH + line);
        __m512i w[2];
        load_values<FORMAT, HIGH>(place.values, line, upper, w);
        step<Fours, M>(sum, w[0], w[1], x);
      }
    }
    hold<M>(sum);
    const float* scales = pass.x.scales + place.index * pass.x.rows + pass.row;
#pragma GCC unroll 2
    for (int z = 0; z < 2; ++z) {
      const __m512 scale = block_numbers<FORMAT>(place, 0, kPart, z);
      __m512 minimum = _mm512_setzero_ps();
      if constexpr (T::kFormat.affine()) minimum = block_numbers<FORMAT>(place, 1, kPart, z);
      const float* block_sums = pass.x.block_sums + T::sums_at(pass, place, kPart);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const __m512 real = _mm512_cvtepi32_ps(sum[m][z]);
        __m512 all = kPart == 0 ? _mm512_mul_ps(real, scale) : _mm512_fmadd_ps(real, scale, load(so_far[z][m]));
        if constexpr (T::kFormat.affine()) all = _mm512_fmadd_ps(minimum, _mm512_set1_ps(block_sums[m]), all);
        if constexpr (kPart < T::kFormat.parts() - 1) {
          store(so_far[z][m], all);
        } else {
          float* to = pass.tile + m * kPanel + z * kLanes;
          store(to, _mm512_fmadd_ps(all, _mm512_set1_ps(scales[m]), load(to)));
        }
      }
    }
  }
  [[gnu::always_inline]] void group(const GroupPlace& place) {
    part<0, false>(place);
    part<0, true>(place);
    if constexpr (T::kRuns == 2) {
      part<1, false>(place);
      part<1, true>(place);
    }
    for (int64_t i = 16; i < T::kFetches; ++i) pass.fetch(place.line + i);
  }
  void finish() const {}
};

// Rows whose sums of both halves have room in registers, beside what the format needs.
constexpr int few_rows(Format format) { return block_format(format).upper_bits() ? 2 : kFewRows; }

template <Format FORMAT, int M>
[[gnu::noinline]] void tile_blocks(const Pass& pass) {
  std::conditional_t<(M <= few_rows(FORMAT)), FewRows<FORMAT, M>, ManyRows<FORMAT, M>> rows(pass);
  each_group<FORMAT>(pass, [&](const GroupPlace& place) { rows.group(place); });
  rows.finish();
}

}  // namespace outrider
