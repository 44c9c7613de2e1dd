// The arithmetic of attention over one split of keys, laid out in 32-bit words:
//
//   keys    [words of a key][columns]       a vector holds one word of 16 keys
//   values  [columns / kStep][value dim]    a word holds a number of one key; with bfloat16, of two adjacent keys
//
// Columns are keys in the order of the row's path. T: format of the products, float32 or bfloat16; P: format of the pools;
// see kv_dot.h. A query vector's result has the same bits whatever other vectors are computed with it.
#pragma once

#include "kv_prefetch.h"
#include "kv_dot.h"
#include "softmax.h"

namespace outrider {

constexpr int64_t kSplit = 128;                // keys
static_assert(2 * kSplit <= KvPrefetch::kMaxRows, "a key and a value each");
constexpr int kMaxColumns = int(kSplit) + 64;  // columns laid out at a time: a split of the cache and 64 draft nodes
template <class T>
constexpr int kTogether = kOnMatrixUnit<T> ? 16 : std::min(4, kSums / 2);  // query vectors multiplied at a time

// The width of a value in words: whole vectors, or pairs of vectors with bfloat16.
template <class T>
int64_t value_words(int64_t dim) {
  return (dim + kLanes * Dot<T>::kStep - 1) / (kLanes * Dot<T>::kStep) * (kLanes * Dot<T>::kStep);
}

// at(column): address of a key, [dim] numbers. Columns up to a whole vector repeat the last one. kv_prefetch: prefetched
// meanwhile.
template <class T, class P, class At>
void lay_keys(int32_t* to, int64_t stride, int64_t dim, int columns, At&& at, KvPrefetch& kv_prefetch) {
  const int64_t words = (dim + Dot<T>::kStep - 1) / Dot<T>::kStep;
  for (int column = 0; column < columns; column += kLanes) {
    const P* from[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = at(std::min(column + i, columns - 1));
    for (int64_t word = 0; word < words; word += kLanes) {
      const int64_t d = word * Dot<T>::kStep;
      Ints part[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) part[i] = Dot<T>::load_words(from[i] + d, dim - d);
      transpose16(part);
      int32_t* out = to + word * stride + column;
      if (kOnMatrixUnit<T> || words - word >= kLanes) {  // the matrix unit needs zeros after the last word
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(out + i * stride, part[i]), kv_prefetch.fetch_line();
      } else {
        for (int i = 0; i < int(words - word); ++i) store(out + i * stride, part[i]);
      }
    }
  }
}

// at(column): address of a value, [dim] numbers. Starts at column `first`, the first of a word.
template <class T, class P, class At>
void lay_values(int32_t* to, int64_t dim, int first, int columns, At&& at, KvPrefetch& kv_prefetch) {
  const int64_t wide = value_words<T>(dim);
  for (int column = first; column < columns; column += Dot<T>::kStep) {
    int32_t* out = to + column / Dot<T>::kStep * wide;
    const P* value = at(column);
    if constexpr (Dot<T>::kStep == 1) {
      for (int64_t d = 0; d < wide; d += kLanes) store(out + d, Dot<T>::load_words(value + d, dim - d)), kv_prefetch.fetch_line();
    } else {
      const P* next = column + 1 < columns ? at(column + 1) : nullptr;
      for (int64_t d = 0; d < wide; d += 2 * kLanes) {
        const Ints a = Dot<T>::load_words(value + d, dim - d);
        const Ints b = next ? Dot<T>::load_words(next + d, dim - d) : ints();
        Ints pairs[2];
        Dot<T>::interleave(a, b, pairs[0], pairs[1]);
        store(out + d, pairs[0]);
        store(out + d + kLanes, pairs[1]);
        kv_prefetch.fetch_line(), kv_prefetch.fetch_line();
      }
    }
  }
  if constexpr (kOnMatrixUnit<T>) {
    const int64_t words = (columns + Dot<T>::kStep - 1) / Dot<T>::kStep, end = (words + kLanes - 1) / kLanes * kLanes;
    std::memset(to + words * wide, 0, size_t((end - words) * wide) * sizeof(int32_t));
  }
}

// Vectors of sums kept at a time for each of N query vectors: a power of two, at most `most`.
template <int N>
constexpr int vectors_for(int most) {
  while (most > 1 && N * most > kSums) most /= 2;
  return most;
}

template <class T, int N>
void score_some(const int32_t* queries, int64_t words, const int32_t* keys, int64_t stride, int columns, float* scores) {
  constexpr int V = vectors_for<N>(2);
  for (int column = 0; column < columns; column += V * kLanes) {
    Floats sum[N][V];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[n][v] = floats();
    }
    for (int64_t word = 0; word < words; ++word) {
      Ints key[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) key[v] = load_ints(keys + word * stride + column + v * kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sum[n][v] = Dot<T>::add(sum[n][v], key[v], queries + (n * words + word) * Dot<T>::kQuery);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) store(scores + n * kMaxColumns + column + v * kLanes, sum[n][v]);
    }
  }
}

// scores: [count][kMaxColumns], of up to kTogether query vectors with all columns. stride: of the keys, a multiple of 32.
template <class T>
void score(int count, const int32_t* queries, int64_t words, const int32_t* keys, int64_t stride, int columns,
           float* scores) {
  switch (count) {
    case 4:
      if constexpr (kTogether<T> >= 4) return score_some<T, 4>(queries, words, keys, stride, columns, scores);
      [[fallthrough]];
    case 3: return score_some<T, 3>(queries, words, keys, stride, columns, scores);
    case 2: return score_some<T, 2>(queries, words, keys, stride, columns, scores);
    default: return score_some<T, 1>(queries, words, keys, stride, columns, scores);
  }
}

// Scaling and soft cap of a score before the softmax.
struct Scaling {
  float factor, softcap;  // softcap 0 is off

  Floats operator()(Floats score) const {
    const Floats value = mul(score, floats(factor));
    if (softcap <= 0.0f) return value;
    const Floats cap = floats(softcap);
    return mul(cap, tanh(div(value, cap)));
  }
};

// Turns the scores of columns into a query vector's softmax weights, in the word layout of values; columns outside
// from .. to - 1 get weight 0. Overwrites scores. sink: initial sum. Returns the largest score and the sum of weights.
template <class T>
Softmax weigh(float* scores, int columns, int64_t from, int64_t to, Scaling scaling, Softmax sink, int32_t* weights) {
  Floats top = floats(sink.largest);
  for (int column = 0; column < columns; column += kLanes) {
    const Mask seen = lanes(to - column) & ~lanes(from - column);
    const Floats value = scaling(load(scores + column));
    const Floats part = select(seen, value, floats(kMinusInfinity));
    store(scores + column, part);
    top = max(top, part);
  }
  const float largest = largest_of(top);
  // If the query sees no column, any base will do.
  const Floats base = floats(largest == kMinusInfinity ? 0.0f : largest);
  Floats sum = floats();
  for (int column = 0; column < columns; column += kLanes * Dot<T>::kStep) {
    const Floats low = exp(sub(load(scores + column), base));
    sum = add(sum, low);
    if constexpr (Dot<T>::kStep == 1) {
      store(weights + column, as_ints(low));
    } else {
      const bool more = column + kLanes < columns;
      const Floats high = more ? exp(sub(load(scores + column + kLanes), base)) : floats();
      sum = add(sum, high);
      Dot<T>::store_weights(weights + column / Dot<T>::kStep * Dot<T>::kQuery, low, high);
    }
  }
  const float before = sink.sum > 0.0f ? sink.sum * std::exp(sink.largest - largest) : 0.0f;
  return {largest, before + sum_of(sum)};
}

// Stores V vectors of sums of each of N query vectors, from number d on.
template <class T, int N, int V>
void store_sums(Floats (*sum)[V], int64_t wide, int64_t d, float* sums) {
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    if constexpr (Dot<T>::kStep == 2) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v += 2) Dot<T>::put_in_order(sum[n] + v);
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(sums + n * wide + d + v * kLanes, sum[n][v]);
  }
}

template <class T, int N, int V>
void combine_some(const int32_t* weights, const int32_t* values, int64_t wide, int64_t d, int words, float* sums) {
  Floats sum[N][V];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[n][v] = floats();
  }
  for (int word = 0; word < words; ++word) {
    const int32_t* from = values + word * wide + d;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Ints value = load_ints(from + v * kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[n][v] = Dot<T>::add(sum[n][v], value, weights + n * kSplit + word * Dot<T>::kQuery);
    }
  }
  store_sums<T, N, V>(sum, wide, d, sums);
}

template <class T, int N>
void combine_for(const int32_t* weights, const int32_t* values, int64_t wide, int words, float* sums) {
  static_assert(N * Dot<T>::kStep <= kSums, "pairs come in two vectors");
  constexpr int kWide = vectors_for<N>(4), kNarrow = std::min(kWide, 2);
  int64_t d = 0;
  for (; d + kWide * kLanes <= wide; d += kWide * kLanes) combine_some<T, N, kWide>(weights, values, wide, d, words, sums);
  for (; d + kNarrow * kLanes <= wide; d += kNarrow * kLanes) combine_some<T, N, kNarrow>(weights, values, wide, d, words, sums);
  if constexpr (Dot<T>::kStep == 1) {
    if (d < wide) combine_some<T, N, 1>(weights, values, wide, d, words, sums);
  }
}

// sums: [count][wide], weights times values of up to kTogether query vectors. weights: [count][kSplit]. words: of values.
template <class T>
void combine(int count, const int32_t* weights, const int32_t* values, int64_t wide, int words, float* sums) {
  switch (count) {
    case 4:
      if constexpr (kTogether<T> >= 4) return combine_for<T, 4>(weights, values, wide, words, sums);
      [[fallthrough]];
    case 3: return combine_for<T, 3>(weights, values, wide, words, sums);
    case 2: return combine_for<T, 2>(weights, values, wide, words, sums);
    default: return combine_for<T, 1>(weights, values, wide, words, sums);
  }
}

}  // namespace outrider
