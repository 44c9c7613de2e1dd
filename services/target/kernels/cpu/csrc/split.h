// The arithmetic of attention over one split of keys, which are laid out in 32-bit words:
//
//   keys    [words of a key][columns]       a vector holds one word of 16 keys
//   values  [columns / kStep][value dim]    a word holds a number of one key; of bfloat16, of two keys side by side
//
// Columns are keys in the order in which they count. T: what is multiplied, float32 or bfloat16; P: what pools hold; see
// keys.h. A query vector's result has the same bits whatever stands beside it.
#pragma once

#include "keys.h"
#include "softmax.h"

namespace outrider {

constexpr int64_t kSplit = 128;                // keys
constexpr int kMaxColumns = int(kSplit) + 64;  // laid out at a time: a split of the cache, and 64 nodes behind it
template <class T>
constexpr int kTogether = kOnMatrixUnit<T> ? 16 : 4;  // query vectors that are multiplied at a time

// A value's width among words: whole vectors, of bfloat16 pairs of them.
template <class T>
int64_t value_words(int64_t dim) {
  return (dim + kLanes * Dot<T>::kStep - 1) / (kLanes * Dot<T>::kStep) * (kLanes * Dot<T>::kStep);
}

// at(column): where a key lies, [dim] numbers. Columns up to a whole vector repeat the last one.
template <class T, class P, class At>
void lay_keys(int32_t* to, int64_t stride, int64_t dim, int columns, At&& at) {
  const int64_t words = (dim + Dot<T>::kStep - 1) / Dot<T>::kStep;
  for (int column = 0; column < columns; column += kLanes) {
    const P* from[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = at(std::min(column + i, columns - 1));
    for (int64_t word = 0; word < words; word += kLanes) {
      const int64_t d = word * Dot<T>::kStep;
      __m512i part[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) part[i] = Dot<T>::load_words(from[i] + d, dim - d);
      transpose16(part);
      int32_t* out = to + word * stride + column;
      if (kOnMatrixUnit<T> || words - word >= kLanes) {  // which wants zeros behind the last word
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) _mm512_store_si512(out + i * stride, part[i]);
      } else {
        for (int i = 0; i < int(words - word); ++i) _mm512_store_si512(out + i * stride, part[i]);
      }
    }
  }
}

// at(column): where a value lies, [dim] numbers. From column `first` on, which begins a word.
template <class T, class P, class At>
void lay_values(int32_t* to, int64_t dim, int first, int columns, At&& at) {
  const int64_t wide = value_words<T>(dim);
  for (int column = first; column < columns; column += Dot<T>::kStep) {
    int32_t* out = to + column / Dot<T>::kStep * wide;
    const P* value = at(column);
    if constexpr (Dot<T>::kStep == 1) {
      for (int64_t d = 0; d < wide; d += kLanes) _mm512_store_si512(out + d, Dot<T>::load_words(value + d, dim - d));
    } else {
      const P* next = column + 1 < columns ? at(column + 1) : nullptr;
      for (int64_t d = 0; d < wide; d += 2 * kLanes) {
        const __m512i a = Dot<T>::load_words(value + d, dim - d);
        const __m512i b = next ? Dot<T>::load_words(next + d, dim - d) : _mm512_setzero_si512();
        _mm512_store_si512(out + d, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(out + d + kLanes, _mm512_unpackhi_epi16(a, b));
      }
    }
  }
  if constexpr (kOnMatrixUnit<T>) {
    const int64_t words = (columns + Dot<T>::kStep - 1) / Dot<T>::kStep, end = (words + kLanes - 1) / kLanes * kLanes;
    std::memset(to + words * wide, 0, size_t((end - words) * wide) * sizeof(int32_t));
  }
}

template <class T, int N>
void score_some(const int32_t* queries, int64_t words, const int32_t* keys, int64_t stride, int columns, float* scores) {
  for (int column = 0; column < columns; column += 2 * kLanes) {
    __m512 sum[N][2];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = _mm512_setzero_ps();
    for (int64_t word = 0; word < words; ++word) {
      const __m512i low = _mm512_load_si512(keys + word * stride + column);
      const __m512i high = _mm512_load_si512(keys + word * stride + column + kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        sum[n][0] = Dot<T>::add(sum[n][0], low, queries[n * words + word]);
        sum[n][1] = Dot<T>::add(sum[n][1], high, queries[n * words + word]);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      _mm512_store_ps(scores + n * kMaxColumns + column, sum[n][0]);
      _mm512_store_ps(scores + n * kMaxColumns + column + kLanes, sum[n][1]);
    }
  }
}

// scores: [count][kMaxColumns], of up to kTogether query vectors with all columns. stride: of keys, a multiple of 32.
template <class T>
void score(int count, const int32_t* queries, int64_t words, const int32_t* keys, int64_t stride, int columns,
           float* scores) {
  switch (count) {
    case 4: return score_some<T, 4>(queries, words, keys, stride, columns, scores);
    case 3: return score_some<T, 3>(queries, words, keys, stride, columns, scores);
    case 2: return score_some<T, 2>(queries, words, keys, stride, columns, scores);
    default: return score_some<T, 1>(queries, words, keys, stride, columns, scores);
  }
}

// What becomes of a score before the softmax.
struct Scaling {
  float factor, softcap;  // softcap 0 is off

  __m512 operator()(__m512 score) const {
    const __m512 value = _mm512_mul_ps(score, _mm512_set1_ps(factor));
    if (softcap <= 0.0f) return value;
    const __m512 cap = _mm512_set1_ps(softcap);
    return _mm512_mul_ps(cap, tanh512(_mm512_div_ps(value, cap)));
  }
};

// Scores of columns as a query vector's weights, in words as values have them; those outside of from .. to - 1 weigh
// nothing. scores are overwritten. sink: what is in the sum already. Returns the largest score and the sum of weights.
template <class T>
Softmax weigh(float* scores, int columns, int64_t from, int64_t to, Scaling scaling, Softmax sink, int32_t* weights) {
  __m512 top = _mm512_set1_ps(sink.largest);
  for (int column = 0; column < columns; column += kLanes) {
    const __mmask16 seen = lanes(to - column) & ~lanes(from - column);
    const __m512 value = scaling(_mm512_load_ps(scores + column));
    const __m512 part = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), seen, value);
    _mm512_store_ps(scores + column, part);
    top = _mm512_max_ps(top, part);
  }
  const float largest = _mm512_reduce_max_ps(top);
  // Where nothing is seen, the difference to any number is as good.
  const __m512 base = _mm512_set1_ps(largest == kMinusInfinity ? 0.0f : largest);
  __m512 sum = _mm512_setzero_ps();
  for (int column = 0; column < columns; column += kLanes * Dot<T>::kStep) {
    const __m512 low = exp512(_mm512_sub_ps(_mm512_load_ps(scores + column), base));
    sum = _mm512_add_ps(sum, low);
    if constexpr (Dot<T>::kStep == 1) {
      _mm512_store_si512(weights + column, _mm512_castps_si512(low));
    } else {
      const bool more = column + kLanes < columns;
      const __m512 high = more ? exp512(_mm512_sub_ps(_mm512_load_ps(scores + column + kLanes), base)) : _mm512_setzero_ps();
      sum = _mm512_add_ps(sum, high);
      _mm512_store_si512(weights + column / 2, __m512i(_mm512_cvtne2ps_pbh(high, low)));
    }
  }
  const float before = sink.sum > 0.0f ? sink.sum * std::exp(sink.largest - largest) : 0.0f;
  return {largest, before + _mm512_reduce_add_ps(sum)};
}

// Two vectors of what lay_values took apart, in order again.
template <class T>
void put_in_order(__m512* sum) {
  if constexpr (Dot<T>::kStep == 2) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 low = _mm512_permutex2var_ps(sum[0], first, sum[1]);
    sum[1] = _mm512_permutex2var_ps(sum[0], second, sum[1]);
    sum[0] = low;
  }
}

// V vectors of each of N query vectors, from number d on.
template <class T, int N, int V>
void store_sums(__m512 (*sum)[V], int64_t wide, int64_t d, float* sums) {
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    if constexpr (V % 2 == 0) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v += 2) put_in_order<T>(sum[n] + v);
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) _mm512_store_ps(sums + n * wide + d + v * kLanes, sum[n][v]);
  }
}

template <class T, int N, int V>
void combine_some(const int32_t* weights, const int32_t* values, int64_t wide, int64_t d, int words, float* sums) {
  __m512 sum[N][V];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[n][v] = _mm512_setzero_ps();
  }
  for (int word = 0; word < words; ++word) {
    const int32_t* from = values + word * wide + d;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const __m512i value = _mm512_load_si512(from + v * kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[n][v] = Dot<T>::add(sum[n][v], value, weights[n * kSplit + word]);
    }
  }
  store_sums<T, N, V>(sum, wide, d, sums);
}

template <class T, int N>
void combine_for(const int32_t* weights, const int32_t* values, int64_t wide, int words, float* sums) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= wide; d += 4 * kLanes) combine_some<T, N, 4>(weights, values, wide, d, words, sums);
  for (; d + 2 * kLanes <= wide; d += 2 * kLanes) combine_some<T, N, 2>(weights, values, wide, d, words, sums);
  if constexpr (Dot<T>::kStep == 1) {
    if (d < wide) combine_some<T, N, 1>(weights, values, wide, d, words, sums);
  }
}

// sums: [count][wide], weights times values of up to kTogether query vectors. weights: [count][kSplit] words, of which `words`
// count.
template <class T>
void combine(int count, const int32_t* weights, const int32_t* values, int64_t wide, int words, float* sums) {
  switch (count) {
    case 4: return combine_for<T, 4>(weights, values, wide, words, sums);
    case 3: return combine_for<T, 3>(weights, values, wide, words, sums);
    case 2: return combine_for<T, 2>(weights, values, wide, words, sums);
    default: return combine_for<T, 1>(weights, values, wide, words, sums);
  }
}

}  // namespace outrider
