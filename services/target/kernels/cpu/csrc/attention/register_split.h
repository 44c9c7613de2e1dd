// The arithmetic of split.h for the few query vectors of a single row: keys are transposed, and values paired, in registers.
// Laying them out in memory would cost more than it saves, because the weights of each layer evict that memory from the
// caches.
//
// Numbers are multiplied and added in the order of split.h, so results have the same bits.
#pragma once

#include "split.h"

namespace outrider {

constexpr int kDirectly = 4;  // query vectors, at most

// scores: [N][kMaxColumns], of N query vectors with all columns. at(column): address of a key, [dim] numbers. kv_prefetch:
// prefetched meanwhile, one line for each line of these columns.
template <class T, class P, int N, class At>
void score_directly(const int32_t* queries, int64_t words, int64_t dim, int columns, At&& at, float* scores, KvPrefetch& kv_prefetch) {
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
        kv_prefetch.fetch_line();
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

// V vectors of words, from word d on, of the weighted sum of all columns' values.
template <class T, class P, int N, int V, class At>
void combine_part(const int32_t* weights, int64_t dim, int64_t wide, int64_t d, int columns, At&& at, float* sums,
                  KvPrefetch& kv_prefetch) {
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
      kv_prefetch.fetch_line();
    }
  }
  store_sums<T, N, V>(sum, wide, d, sums);
}

// sums: [N][wide]. weights: [N][kSplit]. at(column): address of a value, [dim] numbers.
template <class T, class P, int N, class At>
void combine_directly(const int32_t* weights, int64_t dim, int columns, At&& at, float* sums, KvPrefetch& kv_prefetch) {
  const int64_t wide = value_words<T>(dim);
  if constexpr (N * Dot<T>::kStep > kSums) {  // pairs come in two vectors
    combine_directly<T, P, N / 2>(weights, dim, columns, at, sums, kv_prefetch);
    combine_directly<T, P, N - N / 2>(weights + N / 2 * kSplit, dim, columns, at, sums + N / 2 * wide, kv_prefetch);
  } else {
    constexpr int kWide = vectors_for<N>(4), kNarrow = std::min(kWide, 2);
    int64_t d = 0;
    for (; d + kWide * kLanes <= wide; d += kWide * kLanes) {
      combine_part<T, P, N, kWide>(weights, dim, wide, d, columns, at, sums, kv_prefetch);
    }
    for (; d + kNarrow * kLanes <= wide; d += kNarrow * kLanes) {
      combine_part<T, P, N, kNarrow>(weights, dim, wide, d, columns, at, sums, kv_prefetch);
    }
    if constexpr (Dot<T>::kStep == 1) {
      if (d < wide) combine_part<T, P, N, 1>(weights, dim, wide, d, columns, at, sums, kv_prefetch);
    }
  }
}

}  // namespace outrider
