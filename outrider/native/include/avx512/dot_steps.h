// Steps of products of a few rows with a panel, by dot products of vectors.
#pragma once

#include "products/panel_pass.h"

namespace outrider {

constexpr int64_t kChunk = 64;  // bytes of an operand's chunk, of every format

constexpr int kDotRows = 12;  // rows of one pass over a panel: 2 accumulators each, of 32 registers

// sum += products of single numbers, or dot products of pairs or fours, in each 32 bits of w and x. Written out because
// compilers copy the sums about.
struct Ones {
  static void add(__m512& sum, __m512i w, __m512i x) {
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
  }
};
struct Pairs {
  static void add(__m512& sum, __m512i w, __m512i x) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
};
struct Fours {
  static void add(__m512i& sum, __m512i w, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
};

// One step of k: M rows, 32 outputs. x: the first row's; those of the others follow chunk by chunk
template <class Dot, int M, class Sum>
void step(Sum sum[M][2], __m512i w0, __m512i w1, const char* x) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    int32_t bits;
    std::memcpy(&bits, x + m * kChunk, 4);
    const __m512i all = _mm512_set1_epi32(bits);
    Dot::add(sum[m][0], w0, all);
    Dot::add(sum[m][1], w1, all);
  }
}

// Sums have a register each before a loop and behind it, or compilers move them about in every step of it: a pass of
// twelve rows of int4 took 1.5 to 1.7 times as long.
template <int M>
[[gnu::always_inline]] inline void hold(__m512i sum[M][2]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) asm("" : "+v"(sum[m][0]), "+v"(sum[m][1]));
}

// The sums of a group begin with these, [rows].
template <int M>
[[gnu::always_inline]] inline void begin_group(const int32_t* offsets, __m512i sum[M][2]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_set1_epi32(offsets[m]);
  hold<M>(sum);
}

constexpr int kFewRows = 4;  // whose sums of both halves, and results, have room in registers side by side

}  // namespace outrider
