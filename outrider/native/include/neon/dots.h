// Products of a few rows with a panel, by NEON: 32 registers of four numbers. A run computes all eight vectors of a panel's
// outputs for up to three rows, or four of them for up to six. Runs cover a block of k, so that the panel is read once from
// start to end; the tile accumulates their sums.
//
// Every row's sums run over k in a fixed order, so a row's result does not depend on the batch.
#pragma once

#include <array>
#include <utility>

#include "dot_steps.h"

namespace outrider {

using Run = RunOf<kFour>;

// --- float32 and bfloat16 ---

// Four lines or fewer of float32, or of bfloat16: pairs, whose numbers follow one another in a widened row.
template <Format FORMAT>
struct PlainLine {
  static constexpr bool kWide = FORMAT == Format::kFloat32 || !kMultipliesBFloat16;       // rows are float32
  static constexpr int kNumbers = FORMAT == Format::kFloat32 ? 1 : 2;                     // of k
  static constexpr int kLines = FORMAT == Format::kFloat32 || !kWide ? kWords : kWords / 2;  // of a row's register

  // Adds the products of a vector of line LINE with M rows.
  template <int LINE, int M>
  INLINED static void add(float32x4_t* const (&sum)[M], uint8x16_t w, const Words<M>& x) {
    if constexpr (FORMAT == Format::kFloat32) {
      each<M>([&](auto m) INLINED { add_product<LINE>(*sum[m], vreinterpretq_f32_u8(w), x.row[m]); });
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    } else if constexpr (!kWide) {
      each<M>([&](auto m) INLINED {
        *sum[m] = vbfdotq_laneq_f32(*sum[m], vreinterpretq_bf16_u8(w), vreinterpretq_bf16_u8(x.row[m]), LINE);
      });
#endif
    } else {
      const uint32x4_t both = vreinterpretq_u32_u8(w);
      const float32x4_t even = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
      const float32x4_t odd = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xFFFF0000)));
      each<M>([&](auto m) INLINED {
        add_product<2 * LINE>(*sum[m], even, x.row[m]);
        add_product<2 * LINE + 1>(*sum[m], odd, x.row[m]);
      });
    }
  }
};

template <Format FORMAT, int M, int V>
[[gnu::noinline]] void run_plain(Run run) {
  using Line = PlainLine<FORMAT>;
  constexpr int64_t kBlock = block_of(FORMAT), kChunkLines = bytes_of_chunk(FORMAT) / 16 * Line::kLines;
  float32x4_t sum[M][V];
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { sum[m][v] = vld1q_f32(run.tile(m, v)); });
  });
  const int64_t lines = std::min(kBlock, run.pass.weight.k - run.block * kBlock) / Line::kNumbers;
  const char* from = run.weight;
  auto add_line = [&](auto line, const Words<M>& words) INLINED {
    each<V>([&](auto v) INLINED {
      float32x4_t* sums[M];
      each<M>([&](auto m) INLINED { sums[m] = &sum[m][v]; });
      Line::template add<line, M>(sums, load_vector(from + v * 16), words);
    });
    from += kLine;
  };
  for (int64_t line = 0; line < lines; run.x += run.jump) {
    const int64_t end = std::min(lines, line + kChunkLines);
    const char* x = run.x;
#pragma GCC unroll 1
    for (; line + Line::kLines <= end; x += 16) {
      const Words<M> words(x);
      each<Line::kLines>([&](auto i) INLINED {
        run.template fetch<V>(line + i);
        add_line(i, words);
      });
      line += Line::kLines;
    }
    if (line == end) continue;
    const Words<M> words(x);  // the last lines of float32, whose number is any
    each<Line::kLines - 1>([&](auto i) INLINED {
      if (line < end) {
        run.template fetch<V>(line++);
        add_line(i, words);
      }
    });
  }
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { vst1q_f32(run.tile(m, v), sum[m][v]); });
  });
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

// bfloat16 from four rows on. The instruction adds two products to a sum, and then the next two, as two of `run_plain` do.
template <int M, int V>
[[gnu::noinline]] void run_pairs(Run run) {
  constexpr int kPairs = (M + 1) / 2;
  constexpr int64_t kBlock = block_of(Format::kBFloat16), kChunkLines = kGroup / 4;
  float32x4_t sum[kPairs][2 * V];
  each<kPairs>([&](auto p) INLINED {
    each<V>([&](auto v) INLINED {
      const float32x4_t first = vld1q_f32(run.tile(2 * p, v)), second = vld1q_f32(run.tile(std::min(2 * p + 1, M - 1), v));
      sum[p][2 * v] = vzip1q_f32(first, second), sum[p][2 * v + 1] = vzip2q_f32(first, second);
    });
  });
  const int64_t lines = std::min(kBlock, run.pass.weight.k - run.block * kBlock) / 2;
  const char* from = run.weight;
  for (int64_t line = 0; line < lines; run.x += run.jump) {
#pragma GCC unroll 1
    for (int64_t i = 0; i < kChunkLines; i += kWords, line += kWords, from += kWords * kLine) {
      const Words<M, true> words(run.x + i * 4);
      each<V>([&](auto v) INLINED {
        run.template fetch<V>(line + v);
        each<2>([&](auto half) INLINED {
          const char* at = from + 2 * half * kLine + v * 16;
          const uint8x16_t first = load_vector(at), next = load_vector(at + kLine);
          const bfloat16x8_t low = vreinterpretq_bf16_u8(two_outputs<false>(first, next));
          const bfloat16x8_t high = vreinterpretq_bf16_u8(two_outputs<true>(first, next));
          each<kPairs>([&](auto p) INLINED {
            const bfloat16x8_t rows = vreinterpretq_bf16_u8(words.pair[half][p]);
            sum[p][2 * v] = vbfmmlaq_f32(sum[p][2 * v], low, rows);
            sum[p][2 * v + 1] = vbfmmlaq_f32(sum[p][2 * v + 1], high, rows);
          });
        });
      });
    }
  }
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED {
      const float32x4_t low = sum[m / 2][2 * v], high = sum[m / 2][2 * v + 1];
      vst1q_f32(run.tile(m, v), m % 2 ? vuzp2q_f32(low, high) : vuzp1q_f32(low, high));
    });
  });
}

#endif

// --- int8 ---

template <int M, int V>
[[gnu::noinline]] void run_int8(const Run& run) {
  constexpr int kLines = kGroup / 4;
  const int64_t index = run.block * run.pass.x.rows + run.pass.row;
  WholeSums<M, V> sums;
#pragma GCC unroll 1
  for (int i = 0; i < kLines; i += kWords) {
    const char* from = run.weight + i * kLine;
    sums.template add<true>(
        run.x + i * 4,
        [&](auto lane, auto v) INLINED {
          const uint8x16_t stored = load_vector(from + lane * kLine + v * 16);
          return kMultipliesUnsigned ? stored : veorq_u8(stored, vdupq_n_u8(128));
        },
        [&](int lane) INLINED { run.template fetch<V>(i + lane); });
  }
  const float* scales = run.pass.x.scales + index;
  const int32_t* offsets = run.pass.x.offsets + index;
  each<M>([&](auto m) INLINED {
    const float32x4_t scale = vdupq_n_f32(scales[m]);
    const int32x4_t offset = vdupq_n_s32(kMultipliesUnsigned ? offsets[m] : 0);
    each<V>([&](auto v) INLINED {
      float* tile = run.tile(m, v);
      vst1q_f32(tile, vfmaq_f32(vld1q_f32(tile), vcvtq_f32_s32(vaddq_s32(sums.at(m, v), offset)), scale));
    });
  });
}

// --- int4 ---

// What half a group comes to: whole numbers in sum, times the half's scales, plus its centres times the sum of the row's
// numbers. first: what the first half comes to before the row's scale, taken up by the second
template <int M, int V, bool HIGH>
INLINED inline void add_half(const Run& run, const WholeSums<M, V>& sum, float32x4_t first[M][V]) {
  const Operand& operand = run.pass.x;
  const int64_t at = run.block * operand.rows + run.pass.row;
  const int32_t* offsets = operand.offsets + (2 * run.block + HIGH) * operand.rows + run.pass.row;
  const char* scale_bytes = run.weight - run.first * 16 + kGroup / 8 * kLine;
  each<V>([&](auto v) INLINED {
    const auto* halves = reinterpret_cast<const uint16_t*>(scale_bytes) + HIGH * kPanel + (run.first + v) * kFour;
    const float32x4_t column = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
    const uint32x4_t centres = vreinterpretq_u32_u8(load_vector(scale_bytes + 2 * kPanel * 2 + (run.first + v) * 16));
    const float32x4_t centre[2] = {vreinterpretq_f32_u32(vshlq_n_u32(centres, 16)),
                                   vreinterpretq_f32_u32(vandq_u32(centres, vdupq_n_u32(0xFFFF0000)))};
    each<M>([&](auto m) INLINED {
      const float32x4_t real = vcvtq_f32_s32(vaddq_s32(sum.at(m, v), vdupq_n_s32(offsets[m])));
      if constexpr (!HIGH) {
        first[m][v] = vmulq_f32(real, column);
      } else {
        const uint32_t sums = operand.sums[at + m];  // as bfloat16
        const float32x4_t both = vfmaq_f32(first[m][v], real, column);
        float32x4_t all = vfmaq_n_f32(vld1q_f32(run.tile(m, v)), both, operand.scales[at + m]);
        all = vfmaq_f32(all, centre[0], vreinterpretq_f32_u32(vdupq_n_u32(sums << 16)));
        all = vfmaq_f32(all, centre[1], vreinterpretq_f32_u32(vdupq_n_u32(sums & 0xFFFF0000)));
        vst1q_f32(run.tile(m, v), all);
      }
    });
  });
}

// 32 k of a group, the low or the high halves of its bytes.
template <int M, int V, bool HIGH>
INLINED inline void multiply_half(const Run& run, float32x4_t first[M][V]) {
  constexpr int kLines = kGroup / 8, kScaleLines = kInt4ScaleBytes / kLine;
  WholeSums<M, V> sum;
#pragma GCC unroll 1
  for (int i = 0; i < kLines; i += kWords) {
    const char* from = run.weight + i * kLine;
    sum.template add<false>(
        run.x + HIGH * kGroup / 2 + i * 4,
        [&](auto lane, auto v) INLINED {
          const uint8x16_t both = load_vector(from + lane * kLine + v * 16);
          return HIGH ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
        },
        [&](int lane) INLINED {
          if (!HIGH) run.template fetch<V>(i + lane);
        });
  }
  for (int i = 0; HIGH && i < kScaleLines; ++i) run.template fetch<V>(kLines + i);
  add_half<M, V, HIGH>(run, sum, first);
}

template <int M, int V>
[[gnu::noinline]] void run_int4(const Run& run) {
  float32x4_t first[M][V];
  multiply_half<M, V, false>(run, first);
  multiply_half<M, V, true>(run, first);
}

// --- all of them ---

template <int M, int V>
void run_bfloat16(const Run& run) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  if constexpr (kInPairs<M>) return run_pairs<M, V>(run);
#endif
  run_plain<Format::kBFloat16, M, V>(run);
}

template <int M, int V>
void multiply_block(const Run& run) {
  switch (run.pass.weight.format) {
    case Format::kFloat32: return run_plain<Format::kFloat32, M, V>(run);
    case Format::kBFloat16: return run_bfloat16<M, V>(run);
    case Format::kInt8: return run_int8<M, V>(run);
    case Format::kInt4: return run_int4<M, V>(run);
    default: return;  // block formats: block_dots.h
  }
}

template <int M>
void multiply(const Pass& pass) {
  constexpr int V = M <= 3 ? 8 : 4;
  multiply_in_runs<M, V, kFour>(pass, [](const Run& run) INLINED { multiply_block<M, V>(run); });
}

template <int... M>
constexpr std::array<void (*)(const Pass&), sizeof...(M)> kernels_of(std::integer_sequence<int, M...>) {
  return {multiply<M + 1>...};
}
constexpr auto kDots = kernels_of(std::make_integer_sequence<int, kDotRows>());

}  // namespace outrider
