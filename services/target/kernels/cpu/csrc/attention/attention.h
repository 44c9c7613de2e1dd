// Ragged paged attention with a tree mask, reading pages in place.
//
// A row sees `positions[row] + 1` keys: the committed tokens, then its path through the draft tree. The worker visits them
// in that order in splits of 128, counted from the first key, and merges the splits in order. So a row's result has the
// same bits whether its keys are in the cache or in this step, and whatever else is in the batch. One thread may compute all
// splits of a row, or several threads one each.
#pragma once

#include <algorithm>

#include "attend.h"
#include "register_split.h"
#include "amx_split.h"

namespace outrider {

constexpr int kMaxDim = 576;

// T: the format of the products; P: the format of the pools.
template <class T, class P>
class AttentionWorker {
 public:
  // prefetch: weights prefetched meanwhile
  AttentionWorker(const Batch& batch, const AttendCall& call, WeightPrefetch& prefetch)
      : batch_(batch),
        call_(call),
        prefetch_(prefetch),
        scaling_{call.shape.scaling, call.shape.softcap},
        words_(words_of(call.shape.key_dim)),
        wide_(value_words<T>(call.shape.value_dim)) {}

  // partials: [..][2 + value_dim] floats, one row a query vector. next: the following task, or null if not known.
  void run(const AttentionTask& task, const AttentionTask* next, float* partials) {
    if (&task != expected_) expect(&task);
    kv_prefetch_.finish<kOnMatrixUnit<T>>();
    expect(next);
    for (int head = task.head; head < task.head + task.heads; head += task.width) {
      begin(task, head, std::min(task.width, task.head + task.heads - head));
      const int64_t last = *std::max_element(last_, last_ + queries_);
      for (int64_t split = task.split; split < task.split + task.splits; ++split) {
        attend(split * kSplit, std::min((split + 1) * kSplit, last));
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
  static constexpr int kStep = Dot<T>::kStep, kQuery = Dot<T>::kQuery;

  static int64_t words_of(int64_t dim) {
    const int64_t words = (dim + kStep - 1) / kStep;
    return kOnMatrixUnit<T> ? round_up(words, kLanes) : words;
  }

  void begin(const AttentionTask& task, int head_begin, int heads) {
    const auto& shape = call_.shape;
    span_ = task.span;
    head_ = head_begin;
    heads_ = heads;
    kv_head_ = head_begin / (shape.heads / shape.kv_heads);
    own_ = batch_.start[span_] + batch_.committed[span_];  // from this key on, rows see their own paths
    queries_ = in_order_ = 0;
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
      if (in_order_ == queries_ - heads_ && sees_in_order(row)) in_order_ = queries_;
    }
  }

  // True for a row whose path is all rows of its span before it, as in a draft chain.
  bool sees_in_order(int64_t row) const {
    return batch_.positions[row] == batch_.start[span_] + row - batch_.first[span_];
  }

  void take_query(const float* from) {
    auto* to = reinterpret_cast<typename Dot<T>::Number*>(query_at(queries_));
    const int64_t dim = call_.shape.key_dim;
    std::memset(to, 0, words_ * kQuery * sizeof(int32_t));
    for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load(from + d, lanes(dim - d)), lanes(dim - d));
  }

  int32_t* query_at(int index) { return query_ + index * words_ * kQuery; }

  // Prefetch the keys and values of a task's split from now on, if the task is small; null for no task.
  void expect(const AttentionTask* task) {
    expected_ = task;
    kv_prefetch_.clear();
    if (task == nullptr || !task->near) return;
    const auto& shape = call_.shape;
    const bool shared = shape.value_stride != 0;
    const int64_t group = shape.heads / shape.kv_heads;
    const int64_t first = task->head / group, count = (task->head + task->heads - 1) / group + 1 - first;
    kv_prefetch_.begin(count * shape.key_dim * sizeof(P), count * (shared ? shape.key_dim : shape.value_dim) * sizeof(P));
    const int64_t keys = batch_.start[task->span] + batch_.first[task->span + 1] - batch_.first[task->span];
    const int64_t unseen = shape.window > 0 ? batch_.positions[task->row] + 1 - shape.window : 0;
    const int64_t from = std::max(task->split * kSplit, unseen), to = std::min((task->split + 1) * kSplit, keys);
    batch_.slots(task->span, from, to, slot_);
    for (int64_t i = 0; i < to - from; ++i) {
      const int64_t at = slot_[i] * shape.kv_heads + first;
      kv_prefetch_.add(keys_pool() + at * shape.key_dim);
      if (!shared) kv_prefetch_.add(values_pool() + at * shape.value_dim);
    }
  }

  // Computes state_ and sum_ of all queries over the keys from .. to - 1 of one split that each query sees.
  void attend(int64_t from, int64_t to) {
    const float* sinks = from == 0 ? call_.shape.sinks : nullptr;
    for (int query = 0; query < queries_; ++query) {
      state_[query] = sinks ? Softmax{sinks[head_ + query % heads_], 1.0f} : Softmax{kMinusInfinity, 0.0f};
    }
    from = std::max(from, *std::min_element(first_, first_ + queries_) / kSkip * kSkip);
    if (from >= to) {
      std::memset(sum_, 0, queries_ * wide_ * sizeof(float));
    } else if (to <= own_) {
      cached(from, int(to - from), queries_);
    } else {
      if (in_order_ > 0) cached(from, int(std::min(to, last_[in_order_ - 1]) - from), in_order_);
      if (in_order_ < queries_) own(from, to);
    }
  }

  // Keys that the first `queries` query vectors see in storage order.
  void cached(int64_t from, int count, int queries) {
    batch_.slots(span_, from, from + count, slot_);
    replace_broken(from, count);
    if constexpr (!kOnMatrixUnit<T>) {
      switch (queries) {
        case 1: return direct<1>(from, count);
        case 2: return direct<2>(from, count);
        case 3: return direct<3>(from, count);
        case 4: return direct<4>(from, count);
      }
    }
    lay_keys_of(count);
    lay_values_of(slot_, 0, count);
    for (int query = 0; query < queries; query += kTogether<T>) {
      const int some = std::min(kTogether<T>, queries - query);
      score<T>(some, query_at(query), words_, keys_, stride_, count, scores_);
      for (int i = 0; i < some; ++i) take_weights(query + i, i, scores_ + i * kMaxColumns, from, count);
      combine<T>(some, weights_, values_, wide_, (count + kStep - 1) / kStep, sum_ + query * wide_);
    }
    poison_queries(from, queries);
  }

  // Among the keys of slot_[0 .. count), replace draft nodes that are not finite by a key that all rows see: rows before them
  // give them weight 0, and 0 times NaN is NaN.
  void replace_broken(int64_t from, int count) {
    broken_count_ = 0;
    for (int column = int(std::max<int64_t>(0, own_ - from)); column < count; ++column) {
      if (finite(key_at()(column), call_.shape.key_dim) && finite(value_at(slot_)(column), call_.shape.value_dim)) continue;
      slot_[column] = batch_.slot(span_, 0);
      broken_[broken_count_++] = column;
    }
  }

  // Rows that see a replaced key become NaN.
  void poison_queries(int64_t from, int queries) {
    for (int i = 0; i < broken_count_; ++i) {
      const int64_t key = from + broken_[i];
      for (int query = 0; query < queries; ++query) {
        if (first_[query] <= key && key < last_[query]) state_[query].sum = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }

  static bool finite(const P* from, int64_t dim) {
    Floats sum = floats();  // 0 times a number that is not finite is NaN
    for (int64_t d = 0; d < dim; d += kLanes) sum = fmadd(load(from + d, lanes(dim - d)), floats(), sum);
    return sum_of(sum) == 0.0f;
  }

  // N query vectors and the keys of slot_[0 .. count).
  template <int N>
  void direct(int64_t from, int count) {
    const auto& shape = call_.shape;
    score_directly<T, P, N>(query_, words_, shape.key_dim, count, key_at(), scores_, kv_prefetch_);
    for (int i = 0; i < N; ++i) take_weights(i, i, scores_ + i * kMaxColumns, from, count);
    combine_directly<T, P, N>(weights_, shape.value_dim, count, value_at(slot_), sum_, kv_prefetch_);
    poison_queries(from, N);
  }

  // A split with tree paths that are not chains: the keys of the cache and the nodes are laid out once, and each row reads
  // them in its own order.
  void own(int64_t from, int64_t to) {
    const int64_t base = std::min(from, own_), cached = own_ - base;
    const int64_t node = batch_.first[span_] + batch_.committed[span_], nodes = batch_.first[span_ + 1] - node;
    const bool together = cached + nodes <= kMaxColumns;
    const int common = together && from == base ? int(cached) / kStep * kStep : 0;  // leading columns that all rows share
    if (together) {
      batch_.slots(span_, base, own_ + nodes, slot_);
      lay_keys_of(int(cached + nodes));
      lay_values_of(slot_, 0, common);
    }
    const int rows = together ? std::max(1, kTogether<T> / heads_) : 1;  // rows scored at a time
    for (int begin = in_order_; begin < queries_; begin += rows * heads_) {
      const int end = std::min(queries_, begin + rows * heads_);
      for (int first = begin; first < end; first += kTogether<T>) {  // more than once for many heads of one row
        const int some = std::min(kTogether<T>, end - first);
        if (together) score<T>(some, query_at(first), words_, keys_, stride_, int(cached + nodes), scores_);
        for (int query = first; query < first + some; query += heads_) {
          const int heads = std::min(heads_, first + some - query);
          if (query % heads_ == 0) begin_row(query, from, std::min(to, last_[query]), base, together, common);
          const float* scores = scores_ + (query - first) * kMaxColumns;
          if (!together) score<T>(heads, query_at(query), words_, keys_, stride_, count_, scores_);
          for (int i = 0; i < heads; ++i, scores += kMaxColumns) {
            alignas(64) float ordered[kSplit];
            for (int j = 0; j < count_; ++j) ordered[j] = scores[together ? column_[j] : j];
            take_weights(query + i, i, ordered, from, count_);
          }
          combine<T>(heads, weights_, values_, wide_, (count_ + kStep - 1) / kStep, sum_ + query * wide_);
        }
      }
    }
  }

  // Lay out the values of the keys from .. to - 1 of a query's row, in that row's order, after the columns that all rows
  // share; and the keys too if the keys of all rows do not fit side by side.
  void begin_row(int query, int64_t from, int64_t to, int64_t base, bool together, int common) {
    count_ = order(query, from, to, base);
    if (!together) {
      std::copy(order_, order_ + count_, slot_);
      lay_keys_of(count_);
    }
    if (count_ > common) lay_values_of(order_, common, count_);
  }

  // Slots and columns of the keys from .. to - 1 of a query's row; columns count from `base`, nodes after cached keys.
  // Returns the number of keys.
  int order(int query, int64_t from, int64_t to, int64_t base) {
    const int64_t row = row_[query], start = batch_.start[span_];
    const int32_t* path = batch_.path.data() + batch_.path_begin[row] - own_;  // of a key: row in the span
    for (int64_t key = from; key < to; ++key) {
      const int64_t place = key < own_ ? key : start + path[key];  // among the span's keys
      column_[key - from] = int(place - base);
      order_[key - from] = batch_.slot(span_, place);
    }
    return int(std::max<int64_t>(0, to - from));
  }

  const P* keys_pool() const { return static_cast<const P*>(call_.keys); }
  const P* values_pool() const { return static_cast<const P*>(call_.values); }

  // Addresses of the keys of slot_.
  auto key_at() const {
    const P* keys = keys_pool() + kv_head_ * call_.shape.key_dim;
    return [this, keys, pitch = call_.shape.kv_heads * call_.shape.key_dim](int column) { return keys + slot_[column] * pitch; };
  }

  auto value_at(const int64_t* slots) const {
    const P* values = values_pool() + kv_head_ * call_.shape.value_pitch();
    return [slots, values, pitch = call_.shape.kv_heads * call_.shape.value_pitch()](int column) {
      return values + slots[column] * pitch;
    };
  }

  // The keys of slot_[0 .. count).
  void lay_keys_of(int count) {
    stride_ = (count + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    lay_keys<T, P>(keys_, stride_, call_.shape.key_dim, count, key_at(), kv_prefetch_);
    prefetch_.fetch(WeightPrefetch::kPartLines);
  }

  void lay_values_of(const int64_t* slots, int first, int count) {
    lay_values<T, P>(values_, call_.shape.value_dim, first, count, value_at(slots), kv_prefetch_);
    prefetch_.fetch(WeightPrefetch::kPartLines);
  }

  void take_weights(int query, int place, float* scores, int64_t from, int count) {
    int32_t* weights = weights_ + place * kSplit;
    prefetch_.fetch(WeightPrefetch::kPartLines);
    state_[query] = weigh<T>(scores, count, first_[query] - from, last_[query] - from, scaling_, state_[query], weights);
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

  static constexpr int64_t kSkip = 32;  // keys before a window are skipped in multiples of this: whole vectors of pairs

  const Batch& batch_;
  const AttendCall& call_;
  WeightPrefetch& prefetch_;
  const AttentionTask* expected_ = nullptr;
  KvPrefetch kv_prefetch_;  // rows of the expected task
  const Scaling scaling_;
  const int64_t words_, wide_;  // of a key; of a value
  int64_t span_ = 0, kv_head_ = 0, own_ = 0, stride_ = 0;
  int queries_ = 0, head_ = 0, heads_ = 1;
  int in_order_ = 0;  // leading query vectors that see their keys in storage order
  int count_ = 0;  // keys of the row at hand
  int64_t row_[kMaxQueries], first_[kMaxQueries], last_[kMaxQueries];
  int64_t slot_[kMaxColumns], order_[kSplit];
  int column_[kSplit], broken_[kSplit], broken_count_ = 0;
  Softmax state_[kMaxQueries], total_[kMaxQueries];  // of the current split; of the splits before it
  // The matrix unit multiplies 16 query vectors even if there are fewer; the surplus results are discarded.
  static constexpr int kSurplus = kOnMatrixUnit<T> ? kTogether<T> : 1;
  static constexpr int kMaxTogether = std::max(kTogether<T>, kDirectly);  // query vectors at a time
  alignas(64) float scores_[kMaxTogether * kMaxColumns];
  alignas(64) int32_t weights_[kMaxTogether * kSplit];
  alignas(64) int32_t query_[(kMaxQueries + kSurplus) * kMaxDim];
  alignas(64) int32_t keys_[kMaxDim * kMaxColumns];
  alignas(64) int32_t values_[kSplit * kMaxDim];
  alignas(64) float sum_[(kMaxQueries + kSurplus) * kMaxDim];
  alignas(64) float totals_[kMaxQueries * kMaxDim];
};

// Merge the splits of some query vectors of a task, in order.
inline void join_splits(const AttendCall& call, const AttentionJoin& join, const float* partials) {
  const AttentionTask& task = join.task;
  const int64_t dim = call.shape.value_dim, queries = int64_t{task.rows} * task.heads;
  for (int64_t query = join.first; query < join.end; ++query) {  // [heads / width][rows][width]
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
