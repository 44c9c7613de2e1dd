// Ragged paged attention with a tree mask, reading pages in place.
//
// A row sees `positions[row] + 1` keys: the committed ones, then its path through the draft tree. They are visited in
// that order in blocks of 32, and in splits of 128 that are merged in order, both counted from the first key; so a row's
// result is the same bits whether its keys lie in the cache or in this step, and whatever stands beside it. One thread
// may do all splits of a row, or several one each.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "keys.h"
#include "softmax.h"

namespace outrider {

constexpr int kBlock = 32;        // keys
constexpr int kMaxColumns = 96;   // keys that are laid out at a time: a block of the cache, or one and 64 nodes
constexpr int kMaxDim = 576;

// Queries and results as float32 rows of some stride, in numbers; pools as [slot][kv_head][dim].
template <class P>
struct AttentionCall {
  AttentionShape shape;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  const P* keys;
  const P* values;
};

// T: what keys and queries are multiplied in; P: what pools hold.
template <class T, class P>
class AttentionWorker {
 public:
  AttentionWorker(const Batch& batch, const AttentionCall<P>& call)
      : batch_(batch),
        call_(call),
        words_((call.shape.key_dim + Dot<T>::kStep - 1) / Dot<T>::kStep),
        wide_((call.shape.value_dim + kLanes - 1) / kLanes * kLanes) {}

  // partials: [..][2 + value_dim] floats, a query vector each.
  void run(const AttentionTask& task, float* partials) {
    if (task.near) fetch(task);
    for (int head = task.head; head < task.head + task.heads; head += task.width) {
      begin(task, head, std::min(task.width, task.head + task.heads - head));
      const int64_t last = *std::max_element(last_, last_ + queries_);
      for (int64_t split = task.split; split < task.split + task.splits; ++split) {
        clear(split == 0);
        visit(split * kSplit, std::min((split + 1) * kSplit, last));
        if (task.partial >= 0) {
          const int64_t before = int64_t{head - task.head} * task.rows;
          save(partials + (task.partial + before) * (2 + call_.shape.value_dim));
          continue;
        }
        for (int query = 0; query < queries_; ++query) {
          merge(total_[query], totals_ + query * wide_, state_[query], sum_ + query * wide_, wide_);
        }
      }
      if (task.partial < 0) finish();
    }
  }

 private:
  void begin(const AttentionTask& task, int head_begin, int heads) {
    const auto& shape = call_.shape;
    span_ = task.span;
    head_ = head_begin;
    heads_ = heads;
    kv_head_ = head_begin / (shape.heads / shape.kv_heads);
    own_ = batch_.start[span_] + batch_.committed[span_];  // from this key on, rows see their own paths
    queries_ = 0;
    for (int64_t row = task.row; row < task.row + task.rows; ++row) {
      for (int64_t head = head_; head < head_ + heads_; ++head) {
        const int64_t seen = batch_.positions[row] + 1;
        row_[queries_] = row;
        last_[queries_] = seen;
        first_[queries_] = shape.window > 0 ? std::max<int64_t>(0, seen - shape.window) : 0;
        total_[queries_] = Softmax{kMinusInfinity, 0.0f};
        take_query(call_.q + row * call_.q_stride + head * shape.key_dim);
        ++queries_;
      }
    }
  }

  // Before a split: nothing gathered, but in the first one the sinks.
  void clear(bool first) {
    const float* sinks = first ? call_.shape.sinks : nullptr;
    for (int query = 0; query < queries_; ++query) {
      state_[query] = sinks ? Softmax{sinks[head_ + query % heads_], 1.0f} : Softmax{kMinusInfinity, 0.0f};
    }
    std::memset(sum_, 0, queries_ * wide_ * sizeof(float));
  }

  // The keys of a split, in blocks.
  void visit(int64_t from, int64_t to) {
    int64_t key = std::max(from, *std::min_element(first_, first_ + queries_) / kBlock * kBlock);
    for (; key < to && std::min(key + kBlock, to) <= own_; key += kBlock) {
      cached_block(key, std::min(key + kBlock, to));
    }
    if (key < to) own_blocks(key, to);
  }

  // Bring the keys and values of a task's split near. They lie scattered, and waiting for one after the other would cost
  // most of the time. By loads, because processors drop prefetches when many are under way.
  void fetch(const AttentionTask& task) {
    const auto& shape = call_.shape;
    const int64_t group = shape.heads / shape.kv_heads;
    const int64_t first = task.head / group, count = (task.head + task.heads - 1) / group + 1 - first;
    const int64_t from = task.split * kSplit, end = batch_.start[task.span] + batch_.first[task.span + 1] - batch_.first[task.span];
    const int64_t to = std::min(from + kSplit, end);
    int64_t slots[kSplit];
    batch_.slots(task.span, from, to, slots);
    for (int64_t i = 0; i < to - from; ++i) {
      const int64_t at = slots[i] * shape.kv_heads + first;
      touch(call_.keys + at * shape.key_dim, count * shape.key_dim);
      touch(call_.values + at * shape.value_pitch(), count * shape.value_pitch());
    }
  }

  static void touch(const P* from, int64_t count) {
    const volatile char* at = reinterpret_cast<const volatile char*>(from);
    for (int64_t i = 0; i < count * int64_t(sizeof(P)); i += 64) (void)at[i];
  }

  void take_query(const float* from) {
    T* to = reinterpret_cast<T*>(query_ + queries_ * words_);
    const int64_t dim = call_.shape.key_dim;
    query_[queries_ * words_ + words_ - 1] = 0;
    for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load(from + d, lanes(dim - d)), lanes(dim - d));
  }

  // Keys from .. to - 1, which all rows see in one order, as far as they see them.
  void cached_block(int64_t from, int64_t to) {
    batch_.slots(span_, from, to, slot_);
    lay_out(int(to - from));
    for (int query = 0; query < queries_; query += 4) {
      const int count = std::min(4, queries_ - query);
      scores(query, count, int(to - from));
      for (int i = 0; i < count; ++i) weigh(query + i, score_[i], from, to - from, weight_[i]);
      accumulate(query, count, nullptr, int(to - from));
    }
  }

  // Blocks in which paths stand: keys and nodes are laid out once, and each row takes them in its own order.
  void own_blocks(int64_t from, int64_t to) {
    const int64_t base = std::min(from, own_), cached = own_ - base;
    const int64_t node = batch_.first[span_] + batch_.committed[span_], nodes = batch_.first[span_ + 1] - node;
    const bool together = cached + nodes <= kMaxColumns;
    if (together) {
      batch_.slots(span_, base, own_ + nodes, slot_);
      lay_out(int(cached + nodes));
    }
    for (int query = 0; query < queries_; query += heads_) {
      const int64_t row = row_[query];
      const int32_t* path = batch_.path.data() + batch_.path_begin[row] - own_;
      const int64_t behind = batch_.start[span_] - own_;  // of a path's entries: row in the span -> node
      for (int64_t key = from; key < std::min(to, last_[query]); key += kBlock) {
        const int count = int(std::min({key + kBlock, to, last_[query]}) - key);
        int columns[kBlock];
        for (int i = 0; i < count; ++i) {
          const int64_t k = key + i;
          if (together) {
            columns[i] = int(k < own_ ? k - base : cached + path[k] + behind);
          } else {
            slot_[i] = batch_.slot(span_, k < own_ ? k : batch_.start[span_] + path[k]);
            columns[i] = i;
          }
        }
        if (!together) lay_out(count);
        for (int first = query; first < query + heads_; first += 4) {
          const int some = std::min(4, query + heads_ - first);
          scores(first, some, together ? int(cached + nodes) : count);
          for (int i = 0; i < some; ++i) {
            alignas(64) float ordered[kBlock];
            for (int j = 0; j < count; ++j) ordered[j] = score_[i][columns[j]];
            weigh(first + i, ordered, key, count, weight_[i]);
          }
          accumulate(first, some, columns, count);
        }
      }
    }
  }

  // The keys and values of slot_[0 .. count) into the worker's own memory.
  void lay_out(int count) {
    const auto& shape = call_.shape;
    for (int column = 0; column < count; ++column) {
      const P* value = call_.values + (slot_[column] * shape.kv_heads + kv_head_) * shape.value_pitch();
      for (int64_t d = 0; d < wide_; d += kLanes) {
        _mm512_store_ps(values_ + column * wide_ + d, load(value + d, lanes(shape.value_dim - d)));
      }
    }
    turn(count);
  }

  // The keys of columns 0 .. count - 1, turned to [32-bit words][columns].
  void turn(int count) {
    const auto& shape = call_.shape;
    for (int column = 0; column < count; column += kLanes) {
      for (int64_t word = 0; word < words_; word += kLanes) {
        __m512i part[kLanes];
        const int64_t d = word * Dot<T>::kStep;
        for (int i = 0; i < kLanes; ++i) {
          const P* key = call_.keys + (slot_[column + i] * shape.kv_heads + kv_head_) * shape.key_dim + d;
          part[i] = column + i < count ? Dot<T>::load_words(key, shape.key_dim - d) : _mm512_setzero_si512();
        }
        transpose16(part);
        const int64_t some = std::min<int64_t>(kLanes, words_ - word);
        for (int64_t i = 0; i < some; ++i) _mm512_store_si512(keys_ + (word + i) * kMaxColumns + column, part[i]);
      }
    }
  }

  // score_[i]: of queries query + i with all columns.
  void scores(int query, int count, int columns) {
    for (int column = 0; column < columns; column += 2 * kLanes) {
      switch (count) {
        case 4: scores_of<4>(query, column); break;
        case 3: scores_of<3>(query, column); break;
        case 2: scores_of<2>(query, column); break;
        default: scores_of<1>(query, column);
      }
    }
  }

  template <int N>
  void scores_of(int query, int column) {
    __m512 sum[N][2];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = _mm512_setzero_ps();
    const int32_t* q = query_ + query * words_;
    for (int64_t word = 0; word < words_; ++word) {
      const __m512i low = _mm512_load_si512(keys_ + word * kMaxColumns + column);
      const __m512i high = _mm512_load_si512(keys_ + word * kMaxColumns + column + kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        sum[n][0] = Dot<T>::add(sum[n][0], low, q[n * words_ + word]);
        sum[n][1] = Dot<T>::add(sum[n][1], high, q[n * words_ + word]);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      _mm512_storeu_ps(score_[n] + column, sum[n][0]);
      _mm512_storeu_ps(score_[n] + column + kLanes, sum[n][1]);
    }
  }

  // Take a block's scores into a query's softmax: its weights, zero where it sees nothing, and what it held, rescaled.
  void weigh(int query, const float* score, int64_t from, int64_t count, float* weight) {
    const auto& shape = call_.shape;
    const int64_t stop = std::min(count, last_[query] - from), start = std::max<int64_t>(0, first_[query] - from);
    Softmax& state = state_[query];
    __m512 part[2];
    __m512 top = _mm512_set1_ps(kMinusInfinity);
    for (int i = 0; i < 2; ++i) {
      __m512 value = _mm512_mul_ps(_mm512_loadu_ps(score + i * kLanes), _mm512_set1_ps(shape.scaling));
      if (shape.softcap > 0.0f) {
        const __m512 cap = _mm512_set1_ps(shape.softcap);
        value = _mm512_mul_ps(cap, tanh512(_mm512_div_ps(value, cap)));
      }
      const __mmask16 seen = lanes(stop - i * kLanes) & ~lanes(start - i * kLanes);
      part[i] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), seen, value);
      top = _mm512_max_ps(top, part[i]);
    }
    const float largest = std::max(state.largest, _mm512_reduce_max_ps(top));
    if (stop <= start || largest == kMinusInfinity) {
      std::memset(weight, 0, kBlock * sizeof(float));
      scale_[query] = 1.0f;
      return;
    }
    for (int i = 0; i < 2; ++i) {
      part[i] = exp512(_mm512_sub_ps(part[i], _mm512_set1_ps(largest)));
      _mm512_store_ps(weight + i * kLanes, part[i]);
    }
    const float scale = _mm512_cvtss_f32(exp512(_mm512_set1_ps(state.largest - largest)));
    state.sum = state.sum * scale + _mm512_reduce_add_ps(_mm512_add_ps(part[0], part[1]));
    state.largest = largest;
    scale_[query] = scale;
  }

  // sum_ = sum_ * scale_ + weights times values. columns: where the values lie; null if in order.
  void accumulate(int query, int count, const int* columns, int keys) {
    for (int64_t d = 0; d < wide_; d += 4 * kLanes) {
      const int vectors = int(std::min<int64_t>(4, (wide_ - d) / kLanes));
      if (count == 4 && vectors == 4) {
        accumulate_of<4, 4>(query, d, columns, keys);
        continue;
      }
      for (int i = 0; i < count; ++i) {
        switch (vectors) {
          case 4: accumulate_of<1, 4>(query + i, d, columns, keys, i); break;
          case 3: accumulate_of<1, 3>(query + i, d, columns, keys, i); break;
          case 2: accumulate_of<1, 2>(query + i, d, columns, keys, i); break;
          default: accumulate_of<1, 1>(query + i, d, columns, keys, i);
        }
      }
    }
  }

  template <int Q, int N>
  void accumulate_of(int query, int64_t d, const int* columns, int keys, int weights = 0) {
    __m512 sum[Q][N];
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
      const __m512 scale = _mm512_set1_ps(scale_[query + q]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        sum[q][n] = _mm512_mul_ps(_mm512_load_ps(sum_ + (query + q) * wide_ + d + n * kLanes), scale);
      }
    }
    for (int key = 0; key < keys; ++key) {
      const float* value = values_ + (columns ? columns[key] : key) * wide_ + d;
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m512 v = _mm512_load_ps(value + n * kLanes);
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
          sum[q][n] = _mm512_fmadd_ps(_mm512_set1_ps(weight_[weights + q][key]), v, sum[q][n]);
        }
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) _mm512_store_ps(sum_ + (query + q) * wide_ + d + n * kLanes, sum[q][n]);
    }
  }

  void save(float* to) {
    const int64_t dim = call_.shape.value_dim;
    for (int query = 0; query < queries_; ++query, to += 2 + dim) {
      to[0] = state_[query].largest;
      to[1] = state_[query].sum;
      std::memcpy(to + 2, sum_ + query * wide_, dim * sizeof(float));
    }
  }

  void finish() {
    const int64_t dim = call_.shape.value_dim;
    for (int query = 0; query < queries_; ++query) {
      float* to = call_.out + row_[query] * call_.out_stride + (head_ + query % heads_) * dim;
      divide(to, totals_ + query * wide_, total_[query].sum, dim);
    }
  }

  const Batch& batch_;
  const AttentionCall<P>& call_;
  const int64_t words_, wide_;  // of a key, in 32 bits; of a value, in whole vectors
  int64_t span_ = 0, kv_head_ = 0, own_ = 0;
  int queries_ = 0, head_ = 0, heads_ = 1;
  int64_t row_[kMaxQueries], first_[kMaxQueries], last_[kMaxQueries], slot_[kMaxColumns + kLanes] = {};
  float scale_[kMaxQueries];
  Softmax state_[kMaxQueries], total_[kMaxQueries];  // of the split at hand; of those before it
  alignas(64) float score_[4][kMaxColumns];
  alignas(64) float weight_[4][kBlock];
  alignas(64) int32_t query_[kMaxQueries * kMaxDim + kLanes];
  alignas(64) int32_t keys_[kMaxDim * kMaxColumns];
  alignas(64) float values_[kMaxColumns * kMaxDim];
  alignas(64) float sum_[kMaxQueries * kMaxDim];
  alignas(64) float totals_[kMaxQueries * kMaxDim];
};

// Merge the splits of a task that were taken apart, in order.
template <class P>
void join_splits(const AttentionCall<P>& call, const AttentionTask& task, const float* partials) {
  const int64_t dim = call.shape.value_dim, queries = int64_t{task.rows} * task.heads;
  for (int64_t query = 0; query < queries; ++query) {  // [heads / width][rows][width]
    const int64_t block = query / (task.rows * task.width), inside = query % (task.rows * task.width);
    const int64_t wide = std::min<int64_t>(task.width, task.heads - block * task.width);
    const int64_t row = task.row + inside / wide, head = task.head + block * task.width + inside % wide;
    float* to = call.out + row * call.out_stride + head * dim;
    Softmax total{kMinusInfinity, 0.0f};
    for (int64_t split = 0; split < task.splits; ++split) {
      const float* part = partials + (task.partial + split * queries + query) * (2 + dim);
      merge(total, to, Softmax{part[0], part[1]}, part + 2, dim);
    }
    divide(to, to, total.sum, dim);
  }
}

}  // namespace outrider
