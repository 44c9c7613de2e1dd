// Ragged paged attention with a tree mask, reading pages in place.
//
// A row sees `positions[row] + 1` keys: the committed ones, then its path through the draft tree. They are visited in
// that order in blocks of 32, and in splits of 1024 that are combined at the end, both counted from the first key; so a
// row's result is the same bits whether its keys lie in the cache or in this step, and whatever stands beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "batch.h"
#include "simd.h"

namespace outrider {

constexpr int kBlock = 32;        // keys
constexpr int64_t kSplit = 1024;  // keys
constexpr int kMaxQueries = 16;   // query vectors that share a block of keys
constexpr int kMaxDim = 576;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct AttentionShape {
  int64_t heads, kv_heads, key_dim, value_dim;
  float scaling;
  int64_t window;      // keys seen back, the row's own included; 0 is all
  float softcap;       // 0 is off
  const float* sinks;  // [heads] or null
};

// Queries and results as float32 rows of some stride, in numbers; pools as [slot][kv_head][dim].
template <class T>
struct AttentionCall {
  AttentionShape shape;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  const T* keys;
  const T* values;
};

// A block of rows of one span, some query heads of one key head, one split of the keys.
struct AttentionTask {
  int32_t span, rows, kv_head, split;
  int32_t head, heads;  // first query head, and how many
  int64_t row;
  int64_t partial;  // where its unfinished results go; -1 if the row block has one split only
};

inline void transpose16(__m512* r) {
  __m512 t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {  // r[i], r[4+i], r[8+i], r[12+i]: 128-bit lanes hold columns i, 4+i, 8+i, 12+i
    t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xDD);
    r[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

// What a query vector has gathered so far.
struct Softmax {
  float largest, sum;
};

template <class T>
class AttentionWorker {
 public:
  AttentionWorker(const Batch& batch, const AttentionCall<T>& call) : batch_(batch), call_(call) {}

  // partials: [..][2 + value_dim] floats, a query vector each.
  void run(const AttentionTask& task, float* partials) {
    const auto& shape = call_.shape;
    span_ = task.span;
    kv_head_ = task.kv_head;
    heads_ = task.heads;
    own_ = batch_.start[span_] + batch_.committed[span_];  // from this key on, rows see their own paths
    queries_ = 0;
    for (int64_t row = task.row; row < task.row + task.rows; ++row) {
      for (int64_t head = task.head; head < task.head + task.heads; ++head) {
        const int64_t seen = batch_.positions[row] + 1;
        row_[queries_] = row;
        query_[queries_] = call_.q + row * call_.q_stride + head * shape.key_dim;
        last_[queries_] = seen;
        first_[queries_] = shape.window > 0 ? std::max<int64_t>(0, seen - shape.window) : 0;
        const bool sink = shape.sinks != nullptr && task.split == 0;
        state_[queries_] = sink ? Softmax{shape.sinks[head], 1.0f} : Softmax{kMinusInfinity, 0.0f};
        std::memset(sum_[queries_], 0, round_up16(shape.value_dim) * sizeof(float));
        ++queries_;
      }
    }
    const int64_t from = task.split * kSplit;
    const int64_t to = std::min(from + kSplit, *std::max_element(last_, last_ + queries_));
    const int64_t begin = std::max(from, *std::min_element(first_, first_ + queries_) / kBlock * kBlock);
    for (int64_t key = begin; key < to; key += kBlock) block(key, std::min(key + kBlock, to));
    finish(task, partials);
  }

 private:
  static int64_t round_up16(int64_t n) { return (n + 15) / 16 * 16; }

  void block(int64_t from, int64_t to) {
    if (to <= own_) {
      for (int64_t key = from; key < to; ++key) slot_[key - from] = batch_.slot(span_, key);
      gather(to - from);
      return attend(0, queries_, from, to - from);
    }
    for (int query = 0; query < queries_; query += heads_) {  // a row has a block of its own
      const int64_t row = row_[query];
      const int64_t count = std::min(to, last_[query]) - from;
      if (count <= 0) continue;
      const int32_t* path = batch_.path.data() + batch_.path_begin[row] - own_;
      for (int64_t key = from; key < from + count; ++key) {
        slot_[key - from] = batch_.slot(span_, key < own_ ? key : batch_.start[span_] + path[key]);
      }
      gather(count);
      attend(query, query + heads_, from, count);
    }
  }

  // Keys of slot_[0 .. count) turned to [dim][32], values to [32][dim], as float32.
  void gather(int64_t count) {
    const auto& shape = call_.shape;
    for (int64_t start = 0; start < kBlock; start += kLanes) {
      for (int64_t d = 0; d < shape.key_dim; d += kLanes) {
        __m512 part[kLanes];
        const __mmask16 mask = lanes(shape.key_dim - d);
        for (int i = 0; i < kLanes; ++i) {
          const T* key = call_.keys + (slot_[start + i] * shape.kv_heads + kv_head_) * shape.key_dim + d;
          part[i] = start + i < count ? load(key, mask) : _mm512_setzero_ps();
        }
        transpose16(part);
        const int64_t width = std::min<int64_t>(kLanes, shape.key_dim - d);
        for (int64_t i = 0; i < width; ++i) _mm512_storeu_ps(keys_ + (d + i) * kBlock + start, part[i]);
      }
    }
    const int64_t wide = round_up16(shape.value_dim);
    for (int64_t i = 0; i < count; ++i) {
      const T* value = call_.values + (slot_[i] * shape.kv_heads + kv_head_) * shape.value_dim;
      for (int64_t d = 0; d < wide; d += kLanes) {
        _mm512_storeu_ps(values_ + i * wide + d, load(value + d, lanes(shape.value_dim - d)));
      }
    }
  }

  void attend(int begin, int end, int64_t from, int64_t count) {
    int query = begin;
    for (; query + 4 <= end; query += 4) scores<4>(query);
    for (; query < end; ++query) scores<1>(query);
    for (query = begin; query < end; ++query) weigh(query, from, count);
  }

  template <int N>
  void scores(int query) {
    __m512 sum[N][2];
    for (auto& line : sum) line[0] = line[1] = _mm512_setzero_ps();
    for (int64_t d = 0; d < call_.shape.key_dim; ++d) {
      const __m512 low = _mm512_loadu_ps(keys_ + d * kBlock), high = _mm512_loadu_ps(keys_ + d * kBlock + kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m512 q = _mm512_set1_ps(query_[query + n][d]);
        sum[n][0] = _mm512_fmadd_ps(q, low, sum[n][0]);
        sum[n][1] = _mm512_fmadd_ps(q, high, sum[n][1]);
      }
    }
    for (int n = 0; n < N; ++n) {
      _mm512_storeu_ps(score_[query + n], sum[n][0]);
      _mm512_storeu_ps(score_[query + n] + kLanes, sum[n][1]);
    }
  }

  // Take a block's scores and values into a query's softmax.
  void weigh(int query, int64_t from, int64_t count) {
    const auto& shape = call_.shape;
    const int64_t stop = std::min(count, last_[query] - from), begin = std::max<int64_t>(0, first_[query] - from);
    if (stop <= begin) return;
    __m512 part[2];
    __m512 top = _mm512_set1_ps(kMinusInfinity);
    for (int i = 0; i < 2; ++i) {
      __m512 score = _mm512_mul_ps(_mm512_loadu_ps(score_[query] + i * kLanes), _mm512_set1_ps(shape.scaling));
      if (shape.softcap > 0.0f) {
        const __m512 cap = _mm512_set1_ps(shape.softcap);
        score = _mm512_mul_ps(cap, tanh512(_mm512_div_ps(score, cap)));
      }
      const __mmask16 seen = lanes(stop - i * kLanes) & ~lanes(begin - i * kLanes);
      part[i] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), seen, score);
      top = _mm512_max_ps(top, part[i]);
    }
    Softmax& state = state_[query];
    const float largest = std::max(state.largest, _mm512_reduce_max_ps(top));
    if (largest == kMinusInfinity) return;
    alignas(64) float weight[kBlock];
    for (int i = 0; i < 2; ++i) {
      part[i] = exp512(_mm512_sub_ps(part[i], _mm512_set1_ps(largest)));
      _mm512_store_ps(weight + i * kLanes, part[i]);
    }
    alignas(64) float old[kLanes];
    _mm512_store_ps(old, exp512(_mm512_set1_ps(state.largest - largest)));
    state.sum = state.sum * old[0] + _mm512_reduce_add_ps(_mm512_add_ps(part[0], part[1]));
    state.largest = largest;
    const int64_t wide = round_up16(shape.value_dim);
    for (int64_t d = 0; d < wide; d += 4 * kLanes) {
      const int columns = int(std::min<int64_t>(4, (wide - d) / kLanes));
      switch (columns) {
        case 4: accumulate<4>(query, d, wide, begin, stop, weight, old[0]); break;
        case 3: accumulate<3>(query, d, wide, begin, stop, weight, old[0]); break;
        case 2: accumulate<2>(query, d, wide, begin, stop, weight, old[0]); break;
        default: accumulate<1>(query, d, wide, begin, stop, weight, old[0]);
      }
    }
  }

  template <int N>
  void accumulate(int query, int64_t d, int64_t wide, int64_t begin, int64_t stop, const float* weight, float old) {
    __m512 sum[N];
    for (int n = 0; n < N; ++n) {
      sum[n] = _mm512_mul_ps(_mm512_loadu_ps(sum_[query] + d + n * kLanes), _mm512_set1_ps(old));
    }
    for (int64_t key = begin; key < stop; ++key) {
      const __m512 w = _mm512_set1_ps(weight[key]);
      for (int n = 0; n < N; ++n) {
        sum[n] = _mm512_fmadd_ps(w, _mm512_loadu_ps(values_ + key * wide + d + n * kLanes), sum[n]);
      }
    }
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(sum_[query] + d + n * kLanes, sum[n]);
  }

  void finish(const AttentionTask& task, float* partials) {
    const auto& shape = call_.shape;
    for (int query = 0; query < queries_; ++query) {
      if (task.partial >= 0) {
        float* to = partials + (task.partial + query) * (2 + shape.value_dim);
        to[0] = state_[query].largest;
        to[1] = state_[query].sum;
        std::memcpy(to + 2, sum_[query], shape.value_dim * sizeof(float));
        continue;
      }
      float* to = call_.out + row_[query] * call_.out_stride + (task.head + query % heads_) * shape.value_dim;
      for (int64_t d = 0; d < shape.value_dim; ++d) to[d] = sum_[query][d] / state_[query].sum;
    }
  }

  const Batch& batch_;
  const AttentionCall<T>& call_;
  int64_t span_ = 0, kv_head_ = 0, own_ = 0;
  int queries_ = 0, heads_ = 1;
  int64_t row_[kMaxQueries], first_[kMaxQueries], last_[kMaxQueries], slot_[kBlock] = {};
  const float* query_[kMaxQueries];
  Softmax state_[kMaxQueries];
  alignas(64) float score_[kMaxQueries][kBlock];
  alignas(64) float keys_[kMaxDim * kBlock];
  alignas(64) float values_[kBlock * kMaxDim];
  alignas(64) float sum_[kMaxQueries][kMaxDim];
};

// The tasks of a batch; the same for every layer of like shape and window.
struct AttentionPlan {
  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> joined;  // the first of each run of splits
  int64_t partials = 0;               // query vectors with unfinished results

  AttentionPlan() = default;
  AttentionPlan(const Batch& batch, const AttentionShape& shape) {
    const int64_t group = shape.heads / shape.kv_heads;
    const int64_t width = std::min<int64_t>(group, kMaxQueries);
    for (int64_t span = 0; span < batch.spans; ++span) {
      for (int64_t row = batch.first[span]; row < batch.first[span + 1]; row += kMaxQueries / width) {
        const int64_t rows = std::min(kMaxQueries / width, batch.first[span + 1] - row);
        int64_t seen = 0;
        for (int64_t r = row; r < row + rows; ++r) seen = std::max(seen, batch.positions[r] + 1);
        for (int64_t head = 0; head < shape.heads; head += std::min(width, group - head % group)) {
          add({int32_t(span), int32_t(rows), int32_t(head / group), 0, int32_t(head),
               int32_t(std::min(width, group - head % group)), row, -1},
              (seen + kSplit - 1) / kSplit);
        }
      }
    }
  }

 private:
  void add(AttentionTask task, int64_t splits) {
    if (splits == 1) return tasks.push_back(task);
    task.partial = partials;
    joined.push_back(task);
    for (int64_t split = 0; split < splits; ++split) {
      task.split = int32_t(split);
      task.partial = partials;
      tasks.push_back(task);
      partials += int64_t{task.rows} * task.heads;
    }
  }
};

// Combine the splits of one row block and key head, in order.
template <class T>
void join_splits(const Batch& batch, const AttentionCall<T>& call, const AttentionTask& first, const float* partials) {
  const auto& shape = call.shape;
  const int64_t width = 2 + shape.value_dim;
  for (int64_t query = 0; query < first.rows * first.heads; ++query) {
    const int64_t row = first.row + query / first.heads, head = first.head + query % first.heads;
    const int64_t splits = (batch.positions[row] + kSplit) / kSplit;  // those of the row itself
    const float* part = partials + (first.partial + query) * width;
    const int64_t step = first.rows * first.heads * width;
    float largest = kMinusInfinity, sum = 0.0f;
    for (int64_t split = 0; split < splits; ++split) largest = std::max(largest, part[split * step]);
    float* to = call.out + row * call.out_stride + head * shape.value_dim;
    std::fill(to, to + shape.value_dim, 0.0f);
    for (int64_t split = 0; split < splits; ++split) {
      const float* from = part + split * step;
      if (from[1] == 0.0f) continue;
      const float scale = std::exp(from[0] - largest);
      sum += from[1] * scale;
      for (int64_t d = 0; d < shape.value_dim; ++d) to[d] += from[2 + d] * scale;
    }
    for (int64_t d = 0; d < shape.value_dim; ++d) to[d] /= sum;
  }
}

}  // namespace outrider
