// As split.h, for the few query vectors of a single row: keys are turned, and values paired, in registers. Laying them out
// would cost more than it saves, for between two layers the weights sweep such memory out of near caches.
//
// Every number is multiplied and added in the order of split.h, so results have the same bits.
#pragma once

#include "split.h"

namespace outrider {

constexpr int kDirectly = 4;  // query vectors, at most

// scores: [N][kMaxColumns], of N query vectors with all columns. at(column): where a key lies, [dim] numbers. coming: what is
// asked for meanwhile, as often as its lines would come if it were as much as these columns.
template <class T, class P, int N, class At>
void score_directly(const int32_t* queries, int64_t words, int64_t dim, int columns, At&& at, float* scores, Coming& coming) {
  for (int column = 0; column < columns; column += kLanes) {
    const P* from[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = at(std::min(column + i, columns - 1));
    Floats sum[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[n] = floats();
    for (int64_t word = 0; word < words; word += kLanes) {
      const int64_t d = word * Dot<T>::kStep;
      Ints part[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) part[i] = Dot<T>::load_words(from[i] + d, dim - d);
      transpose16(part);
      auto add = [&](int i) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[n] = Dot<T>::add(sum[n], part[i], queries + (n * words + word + i) * Dot<T>::kQuery);
        coming.ask();
      };
      if (words - word >= kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) add(i);
      } else {
        for (int i = 0; i < int(words - word); ++i) add(i);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(scores + n * kMaxColumns + column, sum[n]);
  }
}

// V vectors of words from word d on of what all columns' values, weighted, add up to.
template <class T, class P, int N, int V, class At>
void combine_part(const int32_t* weights, int64_t dim, int64_t wide, int64_t d, int columns, At&& at, float* sums,
                  Coming& coming) {
  Floats sum[N][V];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[n][v] = floats();
  }
  for (int column = 0, word = 0; column < columns; column += Dot<T>::kStep, ++word) {
    const P* value = at(column) + d;
    Ints part[V];
    if constexpr (Dot<T>::kStep == 1) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) part[v] = Dot<T>::load_words(value + v * kLanes, dim - d - v * kLanes);
    } else {
      const P* next = column + 1 < columns ? at(column + 1) + d : nullptr;
#pragma GCC unroll 2
      for (int v = 0; v < V; v += 2) {
        const Ints a = Dot<T>::load_words(value + v * kLanes, dim - d - v * kLanes);
        const Ints b = next ? Dot<T>::load_words(next + v * kLanes, dim - d - v * kLanes) : ints();
        Dot<T>::interleave(a, b, part[v], part[v + 1]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[n][v] = Dot<T>::add(sum[n][v], part[v], weights + n * kSplit + word * Dot<T>::kQuery);
      coming.ask();
    }
  }
  store_sums<T, N, V>(sum, wide, d, sums);
}

// sums: [N][wide]. weights: [N][kSplit]. at(column): where a value lies, [dim] numbers.
template <class T, class P, int N, class At>
void combine_directly(const int32_t* weights, int64_t dim, int columns, At&& at, float* sums, Coming& coming) {
  const int64_t wide = value_words<T>(dim);
  if constexpr (N * Dot<T>::kStep > kSums) {  // pairs come in two vectors
    combine_directly<T, P, N / 2>(weights, dim, columns, at, sums, coming);
    combine_directly<T, P, N - N / 2>(weights + N / 2 * kSplit, dim, columns, at, sums + N / 2 * wide, coming);
  } else {
    constexpr int kMost = vectors_for<N>(4), kFew = std::min(kMost, 2);
    int64_t d = 0;
    for (; d + kMost * kLanes <= wide; d += kMost * kLanes) {
      combine_part<T, P, N, kMost>(weights, dim, wide, d, columns, at, sums, coming);
    }
    for (; d + kFew * kLanes <= wide; d += kFew * kLanes) {
      combine_part<T, P, N, kFew>(weights, dim, wide, d, columns, at, sums, coming);
    }
    if constexpr (Dot<T>::kStep == 1) {
      if (d < wide) combine_part<T, P, N, 1>(weights, dim, wide, d, columns, at, sums, coming);
    }
  }
}

}  // namespace outrider
