// Paged attention of a step: rows attend to the first tokens of their session's prefix KV, through its page table, and
// to the slots of its scratch in their masks. Keys and values are read in place.
//
// A task takes the keys of a split, of one key head of one session, for all queries of that head. Splits begin at fixed
// positions of the prefix KV; the scratch is the last one. Their results are merged in order.
#pragma once

#include <cstring>
#include <vector>

#include "kv_dot.h"
#include "memory.h"
#include "softmax.h"
#include "threads.h"

namespace outrider {

constexpr int64_t kSplit = 256;  // tokens of the prefix KV
constexpr int kBlock = 32;       // keys that are laid out together
constexpr int kTogether = 4;     // queries that share what is loaded of keys and values
constexpr int kWidest = 1024;    // largest head size

// S sessions, Q rows each; T: number format of queries and pool.
template <class T>
struct AttentionCall {
  const T* q;     // [S, Q, heads, dim]
  const T* pool;  // [slots, planes, kv_heads, dim]: keys, then values; one plane where keys are also the values
  T* out;         // [S, Q, heads, dim]
  const int32_t* pages;          // [S, table_pages]
  const int32_t* visible;        // [S, Q]: number of tokens of the prefix KV that a row attends to
  const int32_t* since;          // [S, Q]: the first of them, or null
  const int32_t* scratch_slots;  // [S, scratch]
  const uint8_t* scratch_mask;   // [S, Q, scratch]
  const float* sinks;            // [heads], or null
  int64_t sessions, rows, heads, kv_heads, dim, planes, table_pages, page_size, scratch;
  float softcap;  // 0: none

  int64_t group() const { return heads / kv_heads; }
  int64_t queries() const { return rows * group(); }  // of a key head
  int64_t first_seen(int64_t row) const { return since ? since[row] : 0; }  // row: of all sessions'
  const T* key(int64_t slot, int64_t head) const { return pool + (slot * planes * kv_heads + head) * dim; }
  const T* value(int64_t slot, int64_t head) const { return key(slot, head) + (planes - 1) * kv_heads * dim; }
};

// The keys of one split.
struct Split {
  int64_t session;
  bool scratch;
  int64_t begin, end;  // tokens of the prefix KV, or entries of `used`
};

template <class T>
class Attention {
 public:
  explicit Attention(const AttentionCall<T>& call) : call_(call), width_(round_up(call.dim, kLanes)) {}

  void run(ThreadPool& threads) {
    plan();
    const int64_t heads = call_.kv_heads, tasks = int64_t(splits_.size()) * heads;
    const size_t bytes = tasks * call_.queries() * (width_ + kLanes) * sizeof(float);
    static Buffer partials;
    if (partials.bytes() < bytes) partials = Buffer(bytes);
    partials_ = partials.as<float>();
    parallel_for(threads, tasks, [&](int64_t task) { gather(task / heads, task % heads); });
    parallel_for(threads, call_.sessions, [&](int64_t session) { join(session); });
  }

 private:
  using Words = Dot<T>;
  static constexpr int kStep = Words::kStep, kQuery = Words::kQuery;

  // --- plan of the splits ---

  void plan() {
    used_.resize(call_.sessions * call_.scratch);
    first_split_.push_back(0);
    for (int64_t session = 0; session < call_.sessions; ++session) {
      int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
      for (int64_t row = session * call_.rows; row < (session + 1) * call_.rows; ++row) {
        if (call_.visible[row] <= call_.first_seen(row)) continue;
        first = std::min(first, call_.first_seen(row));
        last = std::max<int64_t>(last, call_.visible[row]);
      }
      for (int64_t begin = first / kSplit * kSplit; begin < last; begin += kSplit) {
        splits_.push_back({session, false, std::max(begin, first / kBlock * kBlock), std::min(begin + kSplit, last)});
      }
      if (const int64_t count = survey_scratch(session)) splits_.push_back({session, true, 0, count});
      first_split_.push_back(int64_t(splits_.size()));
    }
  }

  // Collects the entries of a session's scratch that any row attends to. Returns their number.
  int64_t survey_scratch(int64_t session) {
    int32_t* used = used_.data() + session * call_.scratch;
    const uint8_t* mask = call_.scratch_mask + session * call_.rows * call_.scratch;
    int64_t count = 0;
    for (int64_t entry = 0; entry < call_.scratch; ++entry) {
      uint8_t seen = 0;
      for (int64_t row = 0; row < call_.rows; ++row) seen |= mask[row * call_.scratch + entry];
      if (seen) used[count++] = int32_t(entry);
    }
    return count;
  }

  // --- a split ---

  float* partial(int64_t split, int64_t head, int64_t query) {
    return partials_ + ((split * call_.kv_heads + head) * call_.queries() + query) * (width_ + kLanes);
  }

  struct Workspace {
    std::vector<int32_t> queries;              // [queries, words, kQuery]
    alignas(64) int32_t keys[kBlock * kWidest];  // [words, 32]
    alignas(64) float weights[kTogether][kBlock];
    int64_t slots[kBlock];
  };

  void gather(int64_t index, int64_t head) {
    static thread_local Workspace work;
    const Split& split = splits_[index];
    const int64_t queries = call_.queries(), words = (call_.dim + kStep - 1) / kStep;
    take_queries(work, split.session, head, words);
    for (int64_t query = 0; query < queries; ++query) {
      float* to = partial(index, head, query);
      std::memset(to, 0, (width_ + kLanes) * sizeof(float));
      to[width_] = kMinusInfinity;
    }
    for (int64_t begin = split.begin; begin < split.end; begin += kBlock) {
      const int64_t count = std::min<int64_t>(kBlock, split.end - begin);
      find(work, split, begin, count);
      lay_out(work, head, count, words);
      for (int64_t query = 0; query < queries; query += kTogether) {
        const int64_t some = std::min<int64_t>(kTogether, queries - query);
        uint32_t masks[kTogether];
        uint32_t any = 0;
        for (int64_t i = 0; i < some; ++i) {
          masks[i] = i && (query + i) % call_.group() ? masks[i - 1] : seen(split, begin, count, (query + i) / call_.group());
          any |= masks[i];
        }
        if (!any) continue;
        score(work, query, some, words, masks, partial(index, head, query));
        add_values(work, head, count, some, partial(index, head, query));
      }
    }
  }

  void take_queries(Workspace& work, int64_t session, int64_t head, int64_t words) const {
    const int64_t group = call_.group();
    work.queries.assign(call_.queries() * words * kQuery, 0);
    const Floats scale = floats(1.0f / std::sqrt(float(call_.dim)));
    for (int64_t query = 0; query < call_.queries(); ++query) {
      const int64_t row = session * call_.rows + query / group, own = head * group + query % group;
      const T* from = call_.q + (row * call_.heads + own) * call_.dim;
      auto* to = reinterpret_cast<typename Words::Number*>(work.queries.data() + query * words * kQuery);
      for (int64_t d = 0; d < call_.dim; d += kLanes) {
        const Mask mask = lanes(call_.dim - d);
        store(to + d, mul(load(from + d, mask), scale), mask);
      }
    }
  }

  void find(Workspace& work, const Split& split, int64_t begin, int64_t count) const {
    const int32_t* slots = call_.scratch_slots + split.session * call_.scratch;
    const int32_t* used = used_.data() + split.session * call_.scratch;
    const int32_t* pages = call_.pages + split.session * call_.table_pages;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = begin + i;
      work.slots[i] = split.scratch ? slots[used[token]] : int64_t{pages[token / call_.page_size]} * call_.page_size +
                                                               token % call_.page_size;
    }
  }

  // Bit i: a row of the session attends to key begin + i.
  uint32_t seen(const Split& split, int64_t begin, int64_t count, int64_t row) const {
    const int64_t global = split.session * call_.rows + row;
    uint32_t mask = 0;
    if (split.scratch) {
      const uint8_t* own = call_.scratch_mask + global * call_.scratch;
      const int32_t* used = used_.data() + split.session * call_.scratch;
      for (int64_t i = 0; i < count; ++i) mask |= uint32_t(own[used[begin + i]] != 0) << i;
      return mask;
    }
    auto below = [](int64_t bits) { return bits >= kBlock ? ~uint32_t{0} : bits <= 0 ? 0 : (uint32_t{1} << bits) - 1; };
    return below(std::min(count, call_.visible[global] - begin)) & ~below(call_.first_seen(global) - begin);
  }

  // Transposes keys into columns, padded with zeros, and prefetches the values.
  void lay_out(Workspace& work, int64_t head, int64_t count, int64_t words) const {
    for (int64_t half = 0; half < kBlock; half += kLanes) {
      for (int64_t word = 0; word < words; word += kLanes) {
        Ints row[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          const bool there = half + i < count;
          row[i] = ints();
          if (there) {
            row[i] = Words::load_words(call_.key(work.slots[half + i], head) + word * kStep, call_.dim - word * kStep);
            prefetch_l1(call_.value(work.slots[half + i], head) + word * kStep);
          }
        }
        transpose16(row);
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, words - word); ++i) {
          store(work.keys + (word + i) * kBlock + half, row[i]);
        }
      }
    }
  }

  // Scores of some queries with a block's keys, folded into the online softmax. state: of the first query; its weighted
  // sum of values, then the largest score and the sum of weights.
  void score(Workspace& work, int64_t query, int64_t some, int64_t words, const uint32_t* masks, float* state) const {
    Floats sums[kTogether][2];
    switch (some) {
      case 4: multiply<4>(work, query, words, sums); break;
      case 3: multiply<3>(work, query, words, sums); break;
      case 2: multiply<2>(work, query, words, sums); break;
      default: multiply<1>(work, query, words, sums);
    }
    for (int64_t i = 0; i < some; ++i, state += width_ + kLanes) {
      const Mask low = Mask(masks[i]), high = Mask(masks[i] >> kLanes);
      if (!masks[i]) {
        store(work.weights[i], floats());
        store(work.weights[i] + kLanes, floats());
        continue;
      }
      const Floats none = floats(kMinusInfinity);
      const Floats a = select(low, capped(sums[i][0]), none);
      const Floats b = select(high, capped(sums[i][1]), none);
      const float before = state[width_], largest = std::max(before, largest_of(max(a, b)));
      const Floats top = floats(largest);
      const Floats p = select(low, exp(sub(a, top)), floats());
      const Floats r = select(high, exp(sub(b, top)), floats());
      store(work.weights[i], p);
      store(work.weights[i] + kLanes, r);
      const float decay = before == kMinusInfinity ? 0.0f : std::exp(before - largest);
      state[width_] = largest;
      state[width_ + 1] = state[width_ + 1] * decay + sum_of(add(p, r));
      if (decay != 1.0f) {
        for (int64_t d = 0; d < width_; d += kLanes) {
          store(state + d, mul(load(state + d), floats(decay)));
        }
      }
    }
  }

  template <int M>
  void multiply(const Workspace& work, int64_t query, int64_t words, Floats sums[][2]) const {
    constexpr int V = 2 * M > kSums ? 1 : 2;  // vectors at a time
    const int32_t* q = work.queries.data() + query * words * kQuery;
    for (int half = 0; half < 2; half += V) {
      Floats sum[M][V];
      for (int i = 0; i < M; ++i) {
        for (int v = 0; v < V; ++v) sum[i][v] = floats();
      }
      const int32_t* keys = work.keys + half * kLanes;
      for (int64_t word = 0; word < words; ++word, keys += kBlock) {
        Ints key[V];
        for (int v = 0; v < V; ++v) key[v] = load_ints(keys + v * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) sum[i][v] = Words::add(sum[i][v], key[v], q + (i * words + word) * kQuery);
        }
      }
      for (int i = 0; i < M; ++i) {
        for (int v = 0; v < V; ++v) sums[i][half + v] = sum[i][v];
      }
    }
  }

  Floats capped(Floats score) const {
    if (call_.softcap == 0.0f) return score;
    const Floats cap = floats(call_.softcap);
    return mul(cap, tanh(div(score, cap)));
  }

  void add_values(const Workspace& work, int64_t head, int64_t count, int64_t some, float* state) const {
    switch (some) {
      case 4: return add_values_of<4>(work, head, count, state);
      case 3: return add_values_of<3>(work, head, count, state);
      case 2: return add_values_of<2>(work, head, count, state);
      default: return add_values_of<1>(work, head, count, state);
    }
  }

  template <int M>
  void add_values_of(const Workspace& work, int64_t head, int64_t count, float* state) const {
    const int64_t stride = width_ + kLanes;
    for (int64_t d = 0; d < call_.dim; d += 2 * kLanes) {
      const Mask low = lanes(call_.dim - d), high = lanes(call_.dim - d - kLanes);
      Floats sum[M][2];
      for (int i = 0; i < M; ++i) {
        sum[i][0] = load(state + i * stride + d, low);
        sum[i][1] = load(state + i * stride + d + kLanes, high);
      }
      for (int64_t key = 0; key < count; ++key) {
        const T* value = call_.value(work.slots[key], head) + d;
        const Floats v0 = load(value, low), v1 = load(value + kLanes, high);
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
          const Floats weight = floats(work.weights[i][key]);
          sum[i][0] = fmadd(weight, v0, sum[i][0]);
          sum[i][1] = fmadd(weight, v1, sum[i][1]);
        }
      }
      for (int i = 0; i < M; ++i) {
        store(state + i * stride + d, sum[i][0], low);
        store(state + i * stride + d + kLanes, sum[i][1], high);
      }
    }
  }

  // --- merging the splits of a session ---

  void join(int64_t session) {
    static thread_local std::vector<float> totals;
    totals.resize(width_);
    for (int64_t row = 0; row < call_.rows; ++row) {
      for (int64_t head = 0; head < call_.heads; ++head) {
        Softmax total{kMinusInfinity, 0.0f};
        if (call_.sinks) total = {call_.sinks[head], 1.0f};
        std::fill(totals.begin(), totals.end(), 0.0f);
        const int64_t query = row * call_.group() + head % call_.group();
        for (int64_t split = first_split_[session]; split < first_split_[session + 1]; ++split) {
          const float* part = partial(split, head / call_.group(), query);
          merge(total, totals.data(), Softmax{part[width_], part[width_ + 1]}, part, call_.dim);
        }
        const float inverse = total.sum > 0.0f ? 1.0f / total.sum : 0.0f;
        T* to = call_.out + ((session * call_.rows + row) * call_.heads + head) * call_.dim;
        for (int64_t d = 0; d < call_.dim; d += kLanes) {
          const Mask mask = lanes(call_.dim - d);
          store(to + d, mul(load(totals.data() + d, mask), floats(inverse)), mask);
        }
      }
    }
  }

  const AttentionCall<T> call_;
  const int64_t width_;  // of a sum of values
  float* partials_ = nullptr;
  std::vector<Split> splits_;
  std::vector<int64_t> first_split_;  // of each session
  std::vector<int32_t> used_;         // [S, scratch]
};

}  // namespace outrider
