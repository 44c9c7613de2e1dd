// Steps of products of a few rows with a panel, by AVX2. dots.h and block_dots.h have the products.
#pragma once

#include <type_traits>
#include <utility>

#include "products/panel_pass.h"

namespace outrider {

constexpr int kDotRows = 6;  // rows of one pass over a panel

constexpr int kEight = 8;       // outputs of a vector
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

  float* tile(int m, int v) const { return pass.tile + m * kPanel + (first + v) * kEight; }
  template <int V>
  void fetch(int64_t step) const {
    if (V * kEight == kPanel) return pass.fetch(line + step);
    pass.fetch_half(line + step, first / V);
  }
};

inline __m256i load_vector(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline __m256 broadcast(const char* from) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(from)); }
inline __m256i broadcast_word(const char* from) { return _mm256_castps_si256(broadcast(from)); }

// Written out because compilers would keep too much at a time in 16 registers.
inline void add_product(__m256& sum, __m256 w, __m256 x) {
  __m256 value = sum;  // an operand that lies in memory would have the sum go through memory
  asm("vfmadd231ps %2, %1, %0" : "+x"(value) : "x"(w), "x"(x));
  sum = value;
}
inline void add_products(__m256i& sum, __m256i w, __m256i x) {  // of pairs of 16 bits
  __m256i value = sum, product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(value), "=&x"(product) : "x"(w), "x"(x));
  sum = value;
}
inline void add_bytes(__m256i& sum, __m256i w, __m256i x) {  // of pairs of unsigned with signed bytes, as 16 bits
  __m256i value = sum, product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(value), "=&x"(product) : "x"(w), "x"(x));
  sum = value;
}
inline void set_bytes(__m256i& sum, __m256i w, __m256i x) {  // the first of such products
  __m256i product;
  asm("vpmaddubsw %2, %1, %0" : "=x"(product) : "x"(w), "x"(x));
  sum = product;
}
// f(0), f(1), ... with constants, so that what they index lies in registers: loops are unrolled too late for that, and sums
// would go through memory in every step.
#define INLINED __attribute__((always_inline))
template <class F, int... I>
[[gnu::always_inline]] inline void each_of(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
[[gnu::always_inline]] inline void each(F&& f) {
  each_of(std::make_integer_sequence<int, N>(), f);
}
// The same address, of which compilers do not know that they have read from it.
inline const char* once_more(const char* from) {
  asm("" : "+r"(from));
  return from;
}

// Sums have a register each before a loop and behind it, or compilers move them about in every step of it.
template <int M, int V>
[[gnu::always_inline]] inline void hold(__m256i sum[M][V]) {
  each<M>([&](auto m) INLINED {
    each<V>([&](auto v) INLINED { asm("" : "+x"(sum[m][v])); });
  });
}

}  // namespace outrider
