// Steps of products of a few rows with a panel, by NEON. dots.h and block_dots.h have the products.
//
// An instruction multiplies a vector of weights with one word of a row: a float32, a pair of bfloat16, or four 8-bit numbers.
// From four rows on, matrix instructions multiply two words of two rows with those of two outputs, to the same bits. Without
// i8mm, which multiplies unsigned with signed bytes, weights of 8 bits become signed first, and there are no matrix
// instructions; without bf16, bfloat16 weights are widened and rows are float32.
#pragma once

#include "products/panel_runs.h"

namespace outrider {

constexpr int kFour = 4;  // outputs of a vector

inline uint8x16_t load_vector(const char* from) { return vld1q_u8(reinterpret_cast<const uint8_t*>(from)); }

constexpr int kWords = 4;  // of a row in a register: that many lines at a time

// True if M rows are multiplied two at a time.
template <int M>
#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool kInPairs = M >= 4;
#else
constexpr bool kInPairs = false;
#endif

// Four words of each row; those of the others follow chunk by chunk. In pairs: two words of two rows, the first words in
// pair[0]; the last of an odd number of rows is its own partner.
template <int M, bool PAIRS = false>
struct Words {
  uint8x16_t row[M];

  INLINED explicit Words(const char* x) {
    each<M>([&](auto m) INLINED { row[m] = load_vector(x + m * bytes_of_chunk(Format::kFloat32)); });
  }
};
template <int M>
struct Words<M, true> {
  static constexpr int kPairs = (M + 1) / 2;
  uint8x16_t pair[2][kPairs];

  INLINED explicit Words(const char* x) {
    const Words<M> words(x);
    each<kPairs>([&](auto p) INLINED {
      constexpr int kSecond = 2 * p + 1 < M ? 2 * p + 1 : M - 1;
      const uint64x2_t first = vreinterpretq_u64_u8(words.row[2 * p]), second = vreinterpretq_u64_u8(words.row[kSecond]);
      pair[0][p] = vreinterpretq_u8_u64(vzip1q_u64(first, second));
      pair[1][p] = vreinterpretq_u8_u64(vzip2q_u64(first, second));
    });
  }
};

// Two lines of a vector's four outputs as two words of the first two outputs (SECOND: of the others).
template <bool SECOND>
INLINED inline uint8x16_t two_outputs(uint8x16_t line, uint8x16_t next) {
  const uint32x4_t p = vreinterpretq_u32_u8(line), q = vreinterpretq_u32_u8(next);
  return vreinterpretq_u8_u32(SECOND ? vzip2q_u32(p, q) : vzip1q_u32(p, q));
}

// sum += a line's weights times the rows' words LANE.
template <int LANE>
INLINED inline void add_product(float32x4_t& sum, float32x4_t w, uint8x16_t x) {
  sum = vfmaq_laneq_f32(sum, w, vreinterpretq_f32_u8(x), LANE);
}
template <int LANE>
INLINED inline void add_fours(int32x4_t& sum, uint8x16_t w, uint8x16_t x) {  // of weights below 128
  sum = vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(x), LANE);
}

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool kMultipliesUnsigned = true;
#else
constexpr bool kMultipliesUnsigned = false;
#endif

// sum += a vector of value + 128 times words of the rows; without i8mm of the values themselves.
template <int LANE>
INLINED inline void add_biased(int32x4_t& sum, uint8x16_t w, uint8x16_t x) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  sum = vusdotq_laneq_s32(sum, w, vreinterpretq_s8_u8(x), LANE);
#else
  add_fours<LANE>(sum, w, x);
#endif
}

// Whole numbers: sums of products of M rows with V vectors of outputs.
template <int M, int V>
class WholeSums {
 public:
  INLINED WholeSums() {
    each<kRows>([&](auto m) INLINED {
      each<kVectors>([&](auto v) INLINED { sum_[m][v] = vdupq_n_s32(0); });
    });
  }

  // Adds four lines. x: words of the first row; load(lane, v): weights of a line; fetch(lane): called for each line.
  // BIASED: weights of `add_biased`, else below 128
  template <bool BIASED, class Load, class Fetch>
  INLINED void add(const char* x, Load&& load, Fetch&& fetch) {
    const Words<M, kInPairs<M>> words(x);
    each<V>([&](auto v) INLINED {
      constexpr int kEach = V / kWords;
      if constexpr (v % kEach == 0) fetch(v / kEach);
      add_vector<BIASED, v>(words, [&](auto lane) INLINED { return load(lane, v); });
    });
  }

  // A row's sums with a vector of outputs.
  INLINED int32x4_t at(int m, int v) const {
    if constexpr (!kInPairs<M>) return sum_[m][v];
    const int32x4_t low = sum_[m / 2][2 * v], high = sum_[m / 2][2 * v + 1];  // [output][row]
    return m % 2 ? vuzp2q_s32(low, high) : vuzp1q_s32(low, high);
  }

 private:
  static constexpr int kRows = kInPairs<M> ? (M + 1) / 2 : M, kVectors = kInPairs<M> ? 2 * V : V;

  template <bool BIASED, int VECTOR, class Load>
  INLINED void add_vector(const Words<M>& words, Load&& load) {
    each<kWords>([&](auto lane) INLINED {
      const uint8x16_t w = load(lane);
      each<M>([&](auto m) INLINED {
        if constexpr (BIASED) add_biased<lane>(sum_[m][VECTOR], w, words.row[m]);
        else add_fours<lane>(sum_[m][VECTOR], w, words.row[m]);
      });
    });
  }
#ifdef __ARM_FEATURE_MATMUL_INT8
  template <bool BIASED, int VECTOR, class Load>
  INLINED void add_vector(const Words<M, true>& words, Load&& load) {
    each<2>([&](auto half) INLINED {
      const uint8x16_t line = load(std::integral_constant<int, 2 * half>());
      const uint8x16_t next = load(std::integral_constant<int, 2 * half + 1>());
      const uint8x16_t low = two_outputs<false>(line, next), high = two_outputs<true>(line, next);
      each<kRows>([&](auto p) INLINED {
        const int8x16_t rows = vreinterpretq_s8_u8(words.pair[half][p]);
        sum_[p][2 * VECTOR] = vusmmlaq_s32(sum_[p][2 * VECTOR], low, rows);
        sum_[p][2 * VECTOR + 1] = vusmmlaq_s32(sum_[p][2 * VECTOR + 1], high, rows);
      });
    });
  }
#endif

  int32x4_t sum_[kRows][kVectors];
};

}  // namespace outrider
