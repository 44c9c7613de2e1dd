// Products of a few rows with a panel of a block format, by NEON: the sums are the whole numbers that they are on x86.
#pragma once

#include "block_pass.h"
#include "dot_steps.h"

namespace outrider {

// Some rows, and the panel's vectors from `first` on, over a group.
struct BlockRun {
  const Pass& pass;
  const GroupPlace& place;
  const int first;

  float* tile(int m, int v) const { return pass.tile + m * kPanel + (first + v) * kFour; }
  template <Format FORMAT, int V>
  INLINED void fetch(int64_t i) const {
    if (i >= BlockTraits<FORMAT>::kFetches) return;
    if (V * kFour == kPanel) return pass.fetch(place.line + i);
    pass.fetch_half(place.line + i, first / V);
  }
};

// Values of a line's four k of a vector's outputs, of the group's first or last 32 k. With 8 bits they are signed where
// add_biased takes them so. LINE: known if there are upper bits
template <Format FORMAT, bool HIGH, int LINE>
INLINED inline uint8x16_t load_values(const char* values, int line, int vector) {
  using T = BlockTraits<FORMAT>;
  const char* from = values + vector * 16;
  if constexpr (T::kFormat.bits == 8) {
    const uint8x16_t stored = load_vector(from + (HIGH * 8 + line) * kLine);
    return kMultipliesUnsigned ? stored : veorq_u8(stored, vdupq_n_u8(128));
  } else {
    const uint8x16_t both = load_vector(from + line * kLine);
    const uint8x16_t lower = HIGH ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    if constexpr (T::kUpper == 0) {
      return lower;
    } else {
      constexpr int kPosition = upper_position(T::kFormat, LINE);
      uint8x16_t plane = load_vector(from + upper_offset(T::kFormat, LINE, HIGH));
      if constexpr (kPosition < 4) plane = vshlq_n_u8(plane, 4 - kPosition);
      if constexpr (kPosition > 4) plane = vshrq_n_u8(plane, kPosition - 4);
      return vorrq_u8(lower, vandq_u8(plane, vdupq_n_u8(((1 << T::kUpper) - 1) << 4)));
    }
  }
}

// Scales (kind 0) or minima (kind 1) of a part's blocks, of a vector's outputs, as float32.
template <Format FORMAT>
INLINED inline float32x4_t block_numbers(const GroupPlace& place, int kind, int part, int vector) {
  using T = BlockTraits<FORMAT>;
  auto halves = [](const char* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from))));
  };
  const char* from = T::numbers(place, kind, part);
  if constexpr (!T::kFormat.units) {
    return halves(from + vector * kFour * 2);
  } else {
    uint32_t four;
    std::memcpy(&four, from + vector * kFour, 4);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    const float32x4_t unit = halves(place.units + (kind * kPanel + vector * kFour) * 2);
    if constexpr (T::kFormat.affine()) return vmulq_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))), unit);
    return vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes))))), unit);
  }
}

// The whole numbers of a part: of one half of a run's lines, or, with 8 bits, of the group's first or last lines.
template <Format FORMAT, int M, int V, int PART>
INLINED inline void sum_part(const BlockRun& run, int32x4_t whole[M][V]) {
  using T = BlockTraits<FORMAT>;
  constexpr bool kHigh = PART % 2;
  constexpr int kBegin = PART / 2 * T::kLines;
  const char* x = run.pass.chunk(run.place.index) + kHigh * kGroup / 2;
  auto add_lines = [&](auto known, int first) INLINED {
    const Words<M> words(x + first * 4);
    each<kWords>([&](auto lane) INLINED {
      run.template fetch<FORMAT, V>(8 * kHigh + first + lane);
      each<V>([&](auto v) INLINED {
        const uint8x16_t w = load_values<FORMAT, kHigh, known + lane>(run.place.values, first + lane, run.first + v);
        each<M>([&](auto m) INLINED {
          if constexpr (T::kFormat.bits == 8) add_biased<lane>(whole[m][v], w, words.row[m]);
          else add_fours<lane>(whole[m][v], w, words.row[m]);
        });
      });
    });
  };
  if constexpr (T::kUpper == 0) {
#pragma GCC unroll 1
    for (int first = kBegin; first < kBegin + T::kLines; first += kWords) add_lines(std::integral_constant<int, 0>(), first);
  } else {
    each<T::kLines / kWords>([&](auto four) INLINED {
      add_lines(std::integral_constant<int, kBegin + four * kWords>(), kBegin + four * kWords);
    });
  }
}

// A part, added to the parts before it in so_far, or with these to the tile.
template <Format FORMAT, int M, int V, int PART>
INLINED inline void multiply_part(const BlockRun& run, float32x4_t so_far[M][V]) {
  using T = BlockTraits<FORMAT>;
  constexpr bool kSigned = T::kFormat.bits == 8 && !kMultipliesUnsigned;  // values, whose zero is 0 then
  const Operand& operand = run.pass.x;
  const int64_t at = T::sums_at(run.pass, run.place, PART);
  int32x4_t whole[M][V];
  each<M>([&](auto m) INLINED {
    const int32x4_t begin = vdupq_n_s32(T::kFormat.affine() || kSigned ? 0 : operand.offsets[at + m]);
    each<V>([&](auto v) INLINED { whole[m][v] = begin; });
  });
  sum_part<FORMAT, M, V, PART>(run, whole);
  const float* scales = operand.scales + run.place.index * operand.rows + run.pass.row;
  each<V>([&](auto v) INLINED {
    const float32x4_t scale = block_numbers<FORMAT>(run.place, 0, PART, run.first + v);
    const float32x4_t minimum = T::kFormat.affine() ? block_numbers<FORMAT>(run.place, 1, PART, run.first + v) : scale;
    each<M>([&](auto m) INLINED {
      const float32x4_t real = vcvtq_f32_s32(whole[m][v]);
      float32x4_t all = PART == 0 ? vmulq_f32(real, scale) : vfmaq_f32(so_far[m][v], real, scale);
      if constexpr (T::kFormat.affine()) all = vfmaq_n_f32(all, minimum, operand.block_sums[at + m]);
      if constexpr (PART < T::kParts - 1) so_far[m][v] = all;
      else vst1q_f32(run.tile(m, v), vfmaq_n_f32(vld1q_f32(run.tile(m, v)), all, scales[m]));
    });
  });
}

template <Format FORMAT, int M, int V>
[[gnu::noinline]] void run_blocks(const BlockRun& run) {
  float32x4_t so_far[M][V];
  each<BlockTraits<FORMAT>::kParts>([&](auto part) INLINED { multiply_part<FORMAT, M, V, part>(run, so_far); });
  for (int64_t i = 16; i < BlockTraits<FORMAT>::kFetches; ++i) run.template fetch<FORMAT, V>(i);
}

template <Format FORMAT, int M>
void multiply_blocks(const Pass& pass) {
  constexpr int V = M <= 3 ? 8 : 4;
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  each_group<FORMAT>(pass, [&](const GroupPlace& place) {
    for (int first = 0; first < kPanel / kFour; first += V) run_blocks<FORMAT, M, V>(BlockRun{pass, place, first});
  });
}

}  // namespace outrider
