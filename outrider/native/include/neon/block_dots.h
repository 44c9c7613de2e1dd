// Products of a few rows with a panel of a block format, by NEON: the sums are the whole numbers that they are on x86.
#pragma once

#include "products/block_pass.h"
#include "dot_steps.h"

namespace outrider {

using BlockRun = BlockRunOf<kFour>;

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
      const int64_t at = 8 * kLine + T::kUpper * line / 8 * 2 * kLine + HIGH * kLine;
      uint8x16_t plane = load_vector(from + at);
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

// Four lines of a half from `first` on. LINE: the first one's place among lines whose upper bits lie alike
template <Format FORMAT, int M, int V, bool HIGH, int LINE>
INLINED inline void add_lines(const BlockRun& run, int first, WholeSums<M, V>& whole) {
  whole.template add<BlockTraits<FORMAT>::kFormat.bits == 8>(
      run.pass.chunk(run.place.index) + HIGH * kGroup / 2 + first * 4,
      [&](auto lane, auto v) INLINED {
        return load_values<FORMAT, HIGH, LINE + lane>(run.place.values, first + lane, run.first + v);
      },
      [&](int lane) INLINED { run.template fetch<FORMAT, V>(8 * HIGH + first + lane); });
}

// A part, which is one half of a run's lines, or, with 8 bits, the group's first or last lines; added to so_far.
template <Format FORMAT, int M, int V, bool HIGH>
INLINED inline void add_part(const BlockRun& run, int number, float32x4_t so_far[M][V]) {
  using T = BlockTraits<FORMAT>;
  constexpr bool kSigned = T::kFormat.bits == 8 && !kMultipliesUnsigned;  // values, whose zero is 0 then
  const Operand& operand = run.pass.x;
  const int part = 2 * number + HIGH, line = number * T::kLines;
  const int64_t at = T::sums_at(run.pass, run.place, part);
  WholeSums<M, V> whole;
  if constexpr (T::kUpper == 1) {
    add_lines<FORMAT, M, V, HIGH, 0>(run, line, whole);
    add_lines<FORMAT, M, V, HIGH, kWords>(run, line + kWords, whole);
  } else {  // two upper bits of four lines fill a plane
#pragma GCC unroll 1
    for (int i = 0; i < T::kLines; i += kWords) add_lines<FORMAT, M, V, HIGH, 0>(run, line + i, whole);
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const float32x4_t scale = block_numbers<FORMAT>(run.place, 0, part, run.first + v);
    const float32x4_t minimum = T::kFormat.affine() ? block_numbers<FORMAT>(run.place, 1, part, run.first + v) : scale;
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const int32x4_t offset = vdupq_n_s32(T::kFormat.affine() || kSigned ? 0 : operand.offsets[at + m]);
      so_far[m][v] = vfmaq_f32(so_far[m][v], vcvtq_f32_s32(vaddq_s32(whole.at(m, v), offset)), scale);
      if constexpr (T::kFormat.affine()) so_far[m][v] = vfmaq_n_f32(so_far[m][v], minimum, operand.block_sums[at + m]);
    }
  }
}

template <Format FORMAT, int M, int V>
[[gnu::noinline]] void run_blocks(const BlockRun& run) {
  using T = BlockTraits<FORMAT>;
  float32x4_t so_far[M][V];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) so_far[m][v] = vdupq_n_f32(0.0f);
  }
#pragma GCC unroll 1
  for (int number = 0; number < T::kRuns; ++number) {
    add_part<FORMAT, M, V, false>(run, number, so_far);
    add_part<FORMAT, M, V, true>(run, number, so_far);
  }
  for (int64_t i = 16; i < T::kFetches; ++i) run.template fetch<FORMAT, V>(i);
  const float* scales = run.pass.x.scales + run.place.index * run.pass.x.rows + run.pass.row;
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) vst1q_f32(run.tile(m, v), vfmaq_n_f32(vld1q_f32(run.tile(m, v)), so_far[m][v], scales[m]));
  }
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
