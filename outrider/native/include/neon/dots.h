// Products of a few rows with a panel, by NEON: 32 registers of four numbers. A run computes all eight vectors of a panel's
// outputs for up to three rows, or four of them for up to six. Runs cover a block of k, so that the panel is read once from
// start to end; the tile accumulates their sums.
//
// An instruction multiplies a vector of weights with one word of a row: a float32, a pair of bfloat16, or four 8-bit numbers.
// Without i8mm, which multiplies unsigned with signed bytes, int8 weights become signed first; without bf16, bfloat16 weights
// are widened and rows are float32.
//
// Every row's sums run over k in a fixed order, so a row's result does not depend on the batch.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "panel_pass.h"

namespace outrider {

constexpr int kDotRows = 6;  // rows of one pass over a panel

constexpr int kFour = 4;        // outputs of a vector
constexpr int64_t kLine = 128;  // bytes of a panel for a step of k

// Numbers of k that a run goes over: a group, or, where there are none, what the first cache holds beside the rows.
constexpr int64_t block_of(Format format) { return format == Format::kBFloat16 ? 2 * kGroup : kGroup; }

// Some rows, the panel's vectors from `first` on, and a block of k. weight, x: where these begin, x of the first row, whose
// next chunk is `jump` bytes further. line: how many are before the block's. Two runs over a block fetch half each.
struct Run {
  const Pass& pass;
  const int64_t block, line, jump;
  const int first;
  const char *weight, *x;

  float* tile(int m, int v) const { return pass.tile + m * kPanel + (first + v) * kFour; }
  template <int V>
  void fetch(int64_t step) const {
    if (V * kFour == kPanel) return pass.fetch(line + step);
    pass.fetch_half(line + step, first / V);
  }
};

inline uint8x16_t load_vector(const char* from) { return vld1q_u8(reinterpret_cast<const uint8_t*>(from)); }

// f(0), f(1), ... with constants, so that what they index lies in registers, and lanes are constants.
#define INLINE __attribute__((always_inline))
template <class F, int... I>
[[gnu::always_inline]] inline void each_of(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
[[gnu::always_inline]] inline void each(F&& f) {
  each_of(std::make_integer_sequence<int, N>(), f);
}

constexpr int kWords = 4;  // of a row in a register: that many lines at a time

// Four words of each row; those of the others follow chunk by chunk.
template <int M>
struct Words {
  uint8x16_t row[M];

  INLINE explicit Words(const char* x) {
    each<M>([&](auto m) INLINE { row[m] = load_vector(x + m * bytes_of_chunk(Format::kFloat32)); });
  }
};

// sum += a line's weights times the rows' words LANE.
template <int LANE>
INLINE inline void add_product(float32x4_t& sum, float32x4_t w, uint8x16_t x) {
  sum = vfmaq_laneq_f32(sum, w, vreinterpretq_f32_u8(x), LANE);
}
template <int LANE>
INLINE inline void add_fours(int32x4_t& sum, uint8x16_t w, uint8x16_t x) {  // of weights below 128
  sum = vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(x), LANE);
}

// --- float32 and bfloat16 ---

// Four lines or fewer of float32, or of bfloat16: pairs, whose numbers follow one another in a widened row.
template <Format FORMAT>
struct PlainLine {
  static constexpr bool kWide = FORMAT == Format::kFloat32 || !kMultipliesBFloat16;       // rows are float32
  static constexpr int kNumbers = FORMAT == Format::kFloat32 ? 1 : 2;                     // of k
  static constexpr int kLines = FORMAT == Format::kFloat32 || !kWide ? kWords : kWords / 2;  // of a row's register

  // Adds the products of a vector of line LINE with M rows.
  template <int LINE, int M>
  INLINE static void add(float32x4_t* const (&sum)[M], uint8x16_t w, const Words<M>& x) {
    if constexpr (FORMAT == Format::kFloat32) {
      each<M>([&](auto m) INLINE { add_product<LINE>(*sum[m], vreinterpretq_f32_u8(w), x.row[m]); });
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    } else if constexpr (!kWide) {
      each<M>([&](auto m) INLINE {
        *sum[m] = vbfdotq_laneq_f32(*sum[m], vreinterpretq_bf16_u8(w), vreinterpretq_bf16_u8(x.row[m]), LINE);
      });
#endif
    } else {
      const uint32x4_t both = vreinterpretq_u32_u8(w);
      const float32x4_t even = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
      const float32x4_t odd = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xFFFF0000)));
      each<M>([&](auto m) INLINE {
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
  each<M>([&](auto m) INLINE {
    each<V>([&](auto v) INLINE { sum[m][v] = vld1q_f32(run.tile(m, v)); });
  });
  const int64_t lines = std::min(kBlock, run.pass.weight.k - run.block * kBlock) / Line::kNumbers;
  const char* from = run.weight;
  auto add_line = [&](auto line, const Words<M>& words) INLINE {
    each<V>([&](auto v) INLINE {
      float32x4_t* sums[M];
      each<M>([&](auto m) INLINE { sums[m] = &sum[m][v]; });
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
      each<Line::kLines>([&](auto i) INLINE {
        run.template fetch<V>(line + i);
        add_line(i, words);
      });
      line += Line::kLines;
    }
    if (line == end) continue;
    const Words<M> words(x);  // the last lines of float32, whose number is any
    each<Line::kLines - 1>([&](auto i) INLINE {
      if (line < end) {
        run.template fetch<V>(line++);
        add_line(i, words);
      }
    });
  }
  each<M>([&](auto m) INLINE {
    each<V>([&](auto v) INLINE { vst1q_f32(run.tile(m, v), sum[m][v]); });
  });
}

// --- int8 ---

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool kMultipliesUnsigned = true;
#else
constexpr bool kMultipliesUnsigned = false;
#endif

// sum += a vector of value + 128 times words of the rows; without i8mm of the values themselves.
template <int LANE>
INLINE inline void add_biased(int32x4_t& sum, uint8x16_t w, uint8x16_t x) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  sum = vusdotq_laneq_s32(sum, w, vreinterpretq_s8_u8(x), LANE);
#else
  add_fours<LANE>(sum, w, x);
#endif
}

template <int M, int V>
[[gnu::noinline]] void run_int8(const Run& run) {
  constexpr int kLines = kGroup / 4;
  const int64_t index = run.block * run.pass.x.rows + run.pass.row;
  const int32_t* offsets = run.pass.x.offsets + index;
  int32x4_t sum[M][V];
  each<M>([&](auto m) INLINE {
    each<V>([&](auto v) INLINE { sum[m][v] = vdupq_n_s32(kMultipliesUnsigned ? offsets[m] : 0); });
  });
  const char *from = run.weight, *x = run.x;
#pragma GCC unroll 1
  for (int i = 0; i < kLines; i += kWords, x += 16) {
    const Words<M> words(x);
    each<kWords>([&](auto lane) INLINE {
      run.template fetch<V>(i + lane);
      each<V>([&](auto v) INLINE {
        const uint8x16_t stored = load_vector(from + v * 16);
        const uint8x16_t w = kMultipliesUnsigned ? stored : veorq_u8(stored, vdupq_n_u8(128));
        each<M>([&](auto m) INLINE { add_biased<lane>(sum[m][v], w, words.row[m]); });
      });
      from += kLine;
    });
  }
  const float* scales = run.pass.x.scales + index;
  each<M>([&](auto m) INLINE {
    const float32x4_t scale = vdupq_n_f32(scales[m]);
    each<V>([&](auto v) INLINE {
      float* tile = run.tile(m, v);
      vst1q_f32(tile, vfmaq_f32(vld1q_f32(tile), vcvtq_f32_s32(sum[m][v]), scale));
    });
  });
}

// --- int4 ---

// What half a group comes to: whole numbers in sum, times the half's scales, plus its centres times the sum of the row's
// numbers. first: what the first half comes to before the row's scale, taken up by the second
template <int M, int V, bool HIGH>
INLINE inline void add_half(const Run& run, const int32x4_t sum[M][V], float32x4_t first[M][V]) {
  const Operand& operand = run.pass.x;
  const int64_t at = run.block * operand.rows + run.pass.row;
  const int32_t* offsets = operand.offsets + (2 * run.block + HIGH) * operand.rows + run.pass.row;
  const char* scale_bytes = run.weight - run.first * 16 + kGroup / 8 * kLine;
  each<V>([&](auto v) INLINE {
    const auto* halves = reinterpret_cast<const uint16_t*>(scale_bytes) + HIGH * kPanel + (run.first + v) * kFour;
    const float32x4_t column = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
    const uint32x4_t centres = vreinterpretq_u32_u8(load_vector(scale_bytes + 2 * kPanel * 2 + (run.first + v) * 16));
    const float32x4_t centre[2] = {vreinterpretq_f32_u32(vshlq_n_u32(centres, 16)),
                                   vreinterpretq_f32_u32(vandq_u32(centres, vdupq_n_u32(0xFFFF0000)))};
    each<M>([&](auto m) INLINE {
      const float32x4_t real = vcvtq_f32_s32(vaddq_s32(sum[m][v], vdupq_n_s32(offsets[m])));
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
INLINE inline void multiply_half(const Run& run, float32x4_t first[M][V]) {
  constexpr int kLines = kGroup / 8, kScaleLines = kInt4ScaleBytes / kLine;
  const uint8x16_t nibble = vdupq_n_u8(15);
  int32x4_t sum[M][V];
  each<M>([&](auto m) INLINE {
    each<V>([&](auto v) INLINE { sum[m][v] = vdupq_n_s32(0); });
  });
  const char *from = run.weight, *x = run.x + HIGH * kGroup / 2;
#pragma GCC unroll 1
  for (int i = 0; i < kLines; i += kWords, x += 16) {
    const Words<M> words(x);
    each<kWords>([&](auto lane) INLINE {
      if (!HIGH) run.template fetch<V>(i + lane);
      each<V>([&](auto v) INLINE {
        const uint8x16_t both = load_vector(from + v * 16);
        const uint8x16_t w = HIGH ? vshrq_n_u8(both, 4) : vandq_u8(both, nibble);
        each<M>([&](auto m) INLINE { add_fours<lane>(sum[m][v], w, words.row[m]); });
      });
      from += kLine;
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
void multiply_block(const Run& run) {
  switch (run.pass.weight.format) {
    case Format::kFloat32: return run_plain<Format::kFloat32, M, V>(run);
    case Format::kBFloat16: return run_plain<Format::kBFloat16, M, V>(run);
    case Format::kInt8: return run_int8<M, V>(run);
    case Format::kInt4: return run_int4<M, V>(run);
  }
}

template <int M>
void multiply(const Pass& pass) {
  constexpr int V = M <= 3 ? 8 : 4;
  const Format format = pass.weight.format;
  const int64_t numbers = block_of(format), bytes = bytes_of_panel(format, numbers);  // of a block
  const int64_t chunks = numbers * width_of_operand(format) / bytes_of_chunk(format), jump = pass.x.rows * bytes_of_chunk(format);
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  const char *weight = pass.begin(), *x = pass.chunk(0);
  for (int64_t block = 0; block * numbers < pass.weight.k; ++block, weight += bytes, x += chunks * jump) {
    for (int first = 0; first < kPanel / kFour; first += V) {
      multiply_block<M, V>(Run{pass, block, block * bytes / kLine, jump, first, weight + first * 16, x});
    }
  }
  if (format == Format::kInt8) pass.scale_columns(M);
}

template <int... M>
constexpr std::array<void (*)(const Pass&), sizeof...(M)> kernels_of(std::integer_sequence<int, M...>) {
  return {multiply<M + 1>...};
}
constexpr auto kDots = kernels_of(std::make_integer_sequence<int, kDotRows>());

#undef INLINE

}  // namespace outrider
