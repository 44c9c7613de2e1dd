// Steps of products of a few rows with a panel, by AVX2. dots.h and block_dots.h have the products.
#pragma once

#include "products/panel_runs.h"

namespace outrider {

constexpr int kEight = 8;  // outputs of a vector

using Run = RunOf<kEight>;

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
