// A decoder as a list of operations over float32 rows, run by all threads together.
//
// A barrier separates operations that depend on one another. Within an operation, thread i starts with portion i and takes
// further ones from a counter, so that a preempted thread delays little; the thread that computes a portion does not affect
// its bits. Between products a thread prefetches the weights of its next products.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "matrices/weight_prefetch.h"
#include "attention/attend.h"
#include "sampling/sampling.h"
#include "products/linear.h"
#include "matrices/norm.h"
#include "threads/pool.h"
#include "pruned_head.h"

namespace outrider {

// With more rows than this, threads share the layout of an operand. With fewer, each lays out its own copy, which costs less
// than a barrier.
constexpr int64_t kSharedRows = 24;

// Buffers of float32 rows, one width each; they grow with the batch.
enum BufferId : int32_t { kResidual = 0, kWide = 1, kAttended = 2, kHidden = 3, kBranch = 4, kBuffers = 5 };

enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2 };

// An embedding. Two of the three pointers are null.
struct Table {
  const BF16* numbers16;
  const float* numbers32;
  const Weight* packed;  // of any format
  int64_t width;
};

struct Embed {
  Table table;
  float scale;
};

struct Linear {
  const Weight* weight;
  const Weight* narrow;  // a copy in fewer bits for drafting steps; null if they read the weight itself
  const float* bias;  // [outputs] or null
  Norm norm;  // of the input
  BufferId input, output;
  int64_t input_width, output_width;
  bool add;  // add to the output instead of overwriting it
  Activation activation;  // of gated pairs: outputs come as 16 gates, 16 values, ...
  bool head;  // the LM head: of sampled rows only, into the caller's logits
  float softcap;  // of the head; 0 is off
  PrunedHead pruned_head;  // of the head, if it has one
  size_t operation;  // index among the program's operations
  size_t product;  // index among the program's products
  bool feeds = false;  // of gated pairs: writes the next operation's operand directly
  bool fed = false;  // its operand is written by the operation before it
  std::vector<int64_t> portions;  // first panel of each portion, and the end
  int64_t column = 0;  // first column of the outputs in their buffer
};

// output += norm(input), for models with a norm after a branch.
struct AddNorm {
  Norm norm;
  BufferId input, output;
  int64_t width;
};

// Rotary embedding, in place, of a row's queries and keys in kWide (queries, keys, values side by side); then keys and
// values are stored in the cache.
struct Rotate {
  int32_t layer;
  int64_t heads, kv_heads, key_dim, value_dim, rotary_dim;  // `rotary_dim`: leading numbers of a head that rotate
  const float* cosines;  // [positions, rotary_dim / 2]
  const float* sines;
  Norm query_norm, key_norm;  // of each head
};

struct Attend {
  int32_t layer;
  AttentionShape shape;
  int32_t plan;  // index among the program's plans; layers with equal heads share one
};

// Copies the residual stream, normalised if there is a norm, into the caller's features if the call captures this mark. The
// features have the format of the computation.
struct Capture {
  int32_t mark;
  int64_t width;
  Norm norm;
};

// Copies every row's residual stream into the pool of states, from `column` on, for the local EAGLE head.
struct StoreState {
  int64_t column, width;
};

// Of the EAGLE head (eagle_head.cpp): kHidden = the row's state in the pool.
struct LoadState {
  int64_t width;
};

// Of the EAGLE head: kHidden = [norm(embedding), norm(residual)] side by side.
struct JoinEmbedding {
  Table table;
  Norm embedding, state;
  bool after_norm;  // the normalised state replaces the residual stream
};

using Operation = std::variant<Embed, Linear, AddNorm, Rotate, Attend, Capture, StoreState, LoadState, JoinEmbedding>;

struct Call {
  Batch batch;  // of one step
  const void* const* keys;  // [layers], pools
  const void* const* values;
  void* states;  // the pool of hidden states, [slots, state_width], in the format of the computation; null for none
  int64_t state_width;
  float* logits;  // [sampled_rows, vocab]
  // Sampling of the first rows; null for none. If it covers all rows, most logits may be approximate.
  const SampleCall* samples;
  const int64_t* columns;  // [marks], first column of each captured state, or -1; null for no capture
  const int64_t* captured;  // [captured_rows]
  int64_t captured_rows;
  void* features;  // [captured_rows, feature_width], bfloat16 or float
  int64_t feature_width;
  const Weight* fusion;  // multiplies the captured rows at the end; null for none
  const float* fusion_bias;  // [outputs] or null
  void* fused;  // [captured_rows, outputs], in the features' format
};

// Multi-step decoding of the same sessions: each step's rows are the tokens that the step before sampled.
struct MultiStep {
  int64_t steps;  // most steps
  const int64_t* stops;  // stop tokens of the sessions, row after row
  const int64_t* stop_counts;  // [rows], number of stop tokens of each row
  const int32_t* interrupt_fds;  // file descriptors; the call returns after a step once one of them is readable
  int64_t interrupt_fd_count;
  bool narrow;  // use the narrow copies of the weights: the samples are draft tokens
  uint32_t* const* texts;  // [rows], tokens of the sessions, with room for the new ones; null for those not looked up
  const int64_t* lengths;  // [rows], their lengths
  int64_t repeat_length;  // end once the last `repeat_length` tokens of a session occur earlier in its text; 0: never
  bool draft_chain;  // of the EAGLE head: the first step's rows are committed tokens; see eagle_head.cpp
  const float* acceptance_rates;  // of the EAGLE head, [2, 16]: acceptance rate by probability bin, greedy first; or null
  double token_gain, row_cost, step_cost;  // seconds saved by an accepted draft token; seconds it costs per row and per step
};

// Reports whether one of some file descriptors is readable, which interrupts the loop.
class InterruptPoll {
 public:
  InterruptPoll(const int32_t* files, int64_t count) {
    for (int64_t i = 0; i < count; ++i) files_.push_back({files[i], POLLIN, 0});
  }
  bool interrupted() const { return !files_.empty() && poll(files_.data(), files_.size(), 0) > 0; }

 private:
  mutable std::vector<pollfd> files_;
};

// True if the last `repeat_length` tokens of a text occur in it earlier.
bool occurs_earlier(const uint32_t* text, int64_t length, int64_t repeat_length);

// Calibrated acceptance rate of a draft token of some probability. acceptance_rates: [2, 16], greedy sessions first
inline double acceptance_rate(const float* acceptance_rates, float probability, bool greedy) {
  constexpr int64_t kBins = 16;
  return acceptance_rates[std::clamp<int64_t>(int64_t(probability * kBins), 0, kBins - 1) + (greedy ? 0 : kBins)];
}

// Tracks the probability that each session's draft chain is accepted so far; decides whether another step pays.
class DraftStopRule {
 public:
  DraftStopRule(const MultiStep& multi_step, int64_t sessions) : multi_step_(multi_step), reach_(sessions, 1.0) {}

  bool continues(const SampleCall& samples) {
    if (multi_step_.acceptance_rates == nullptr) return true;
    double gain = 0.0;
    for (size_t i = 0; i < reach_.size(); ++i) {
      const bool greedy = samples.sessions[i].temperature == 0.0;
      reach_[i] *= acceptance_rate(multi_step_.acceptance_rates, samples.probabilities[i], greedy);
      gain += std::max(0.0, reach_[i] * multi_step_.token_gain - multi_step_.row_cost);
    }
    return gain > multi_step_.step_cost;
  }

 private:
  const MultiStep& multi_step_;
  std::vector<double> reach_;
};

class Program {
 public:
  // beside: a program whose thread pool it shares; the two must never run at once. null creates a pool.
  Program(int threads, bool bfloat16, PoolFormat pools, const Program* beside = nullptr);
  void add(Operation operation);
  void pruned_head(const PrunedHead& pruned_head) { std::get<Linear>(operations_[head_]).pruned_head = pruned_head; }
  void narrow(const Weight& weight) { std::get<Linear>(operations_.back()).narrow = &weight; }
  int32_t plan_of(const AttentionShape& shape);
  void set_width(BufferId buffer, int64_t width) { widths_[buffer] = std::max(widths_[buffer], width); }
  void run(const Call& call);
  void run_narrow(const Call& call);  // with the narrow copies of the weights
  // Multi-step decoding. Ends early after a step in which a session ends, a text repeats or a file becomes readable. Samples
  // and captured rows of the steps follow one another. Every span is one sampled row, and nothing is fused. Returns the
  // number of steps computed.
  int64_t run(Call call, const MultiStep& multi_step, DraftStopRule* stop_rule = nullptr);
  int64_t draft_chain(Call call, const MultiStep& multi_step);

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };

  void prepare(const Call& call);
  void set_prefetch_ranges();
  void work(int thread, const Call& call);
  void prefetch_weights(int thread, size_t operation) const;
  void wait(int thread) {
    pool_->barrier().wait([this, thread] { prefetch_[thread].fetch(WeightPrefetch::kSpinLines); });
  }
  template <class Function>
  void portions(Counter& next, int thread, int64_t count, Function&& function) {
    each_portion(next.next, thread, pool_->threads(), count, function);
  }
  void execute(const Embed& op, int thread, const Call& call, Counter* next);
  void execute(const Linear& op, int thread, const Call& call, Counter* next);
  void execute(const AddNorm& op, int thread, const Call& call, Counter* next);
  void execute(const Rotate& op, int thread, const Call& call, Counter* next);
  void execute(const Attend& op, int thread, const Call& call, Counter* next);
  void execute(const Capture& op, int thread, const Call& call, Counter* next);
  void execute(const StoreState& op, int thread, const Call& call, Counter* next);
  void execute(const LoadState& op, int thread, const Call& call, Counter* next);
  void execute(const JoinEmbedding& op, int thread, const Call& call, Counter* next);
  bool skips(const Operation& operation, const Call& call) const;
  template <class T>
  void capture(const Capture& op, const Call& call, int64_t index, T* to);
  const Weight& weight_of(const Linear& op) const {
    if (narrow_ && op.narrow) return *op.narrow;
    return op.head && pruned_ ? *op.pruned_head.weight : *op.weight;
  }
  bool may_prune(const Call& call) const;
  void sample(int thread);
  void prepare_pruning();
  void sample_pruned(int thread, const Call& call);
  LogitBounds bounds_of_row(const Linear& op, int thread, const Call& call, int64_t row);
  void make_exact(const Linear& op, int thread, const Call& call, Counter* next);
  template <class T>
  void fuse(int thread, const Call& call);
  template <class P>
  void store_heads(const Rotate& op, const Call& call, int64_t row, int64_t head, int64_t slot);
  template <class Fill>
  Operand operand_of(const Weight& weight, int thread, Counter* next, int64_t rows, Fill&& fill);
  void fill_row(const Linear& op, const Call& call, const Weight& weight, const Operand& operand, int64_t row,
                float* scratch);

  void store_gated(const Linear& op, int64_t panel, int64_t first, int64_t count, const float* tile);
  void feed(const Linear& op, int64_t panel, int64_t rows);
  const Linear& behind(const Linear& op) const { return *std::get_if<Linear>(&operations_[op.operation + 1]); }
  void store_plain(const Linear& op, const Call& call, int64_t panel, int64_t first, int64_t count, const float* tile);

  float* row(BufferId buffer, int64_t index) { return buffers_[buffer].as<float>() + index * widths_[buffer]; }

  std::shared_ptr<Pool> pool_;
  const bool bfloat16_;  // format in which keys and queries are multiplied and states captured; else float32
  const PoolFormat pools_;
  std::vector<Operation> operations_;
  size_t products_ = 0;  // number of products among them
  size_t head_ = 0;  // index of the LM head
  bool narrow_ = false;  // this call uses the narrow copies
  size_t join_operation_ = 0;  // index of the JoinEmbedding operation, where later steps of an EAGLE head start
  size_t begin_ = 0;  // first operation of this call
  bool pruned_ = false;  // this call's logits come from the narrow copy of the head
  bool all_greedy_ = true;
  PruningGate pruning_gate_;
  PanelStates panel_states_;
  std::vector<PrunedRow> pruned_rows_;
  std::vector<AttentionShape> shapes_;
  std::vector<AttentionPlan> plans_;
  std::optional<SampleBatch> samples_;
  static constexpr int kPruningCounters = 8;
  std::vector<Counter> counters_;  // two an operation, two for the fusion, kPruningCounters, one for sampling
  std::vector<int64_t> slots_;  // of the batch's rows
  std::vector<int32_t> spans_;  // of the batch's rows
  int64_t widths_[kBuffers] = {};
  Buffer buffers_[kBuffers];
  int64_t capacity_ = 0;  // rows that the buffers hold
  std::vector<WeightPrefetch> prefetch_;  // of each thread
  std::vector<Buffer> scratch_;  // each thread's operand
  Buffer shared_;  // the operand that all threads fill
  Buffer fed_;  // the operand that the operation before fills
  Buffer partials_;
};

// A row of an embedding as float32. to: [width]
void read_row(const Table& table, int64_t id, float* to);

template <class To, class From>
void copy_as(To* to, const From* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i, lanes(count - i)), lanes(count - i));
}

// True if a token ends its session, or a row could not be sampled.
bool any_ends(const MultiStep& multi_step, const int64_t* tokens, int64_t rows);

// fill(operand, row): lays out one row
template <class Fill>
Operand Program::operand_of(const Weight& weight, int thread, Counter* next, int64_t rows, Fill&& fill) {
  if (rows <= kSharedRows) {
    const Operand operand = operand_in(scratch_[thread].as<char>(), weight, rows);
    for (int64_t i = 0; i < rows; ++i) {
      fill(operand, i);
      prefetch_[thread].fetch(WeightPrefetch::kRowLines);
    }
    return operand;
  }
  const Operand operand = operand_in(shared_.as<char>(), weight, rows);
  portions(*next, thread, (rows + 7) / 8, [&](int64_t part) {
    for (int64_t i = 8 * part; i < std::min(rows, 8 * part + 8); ++i) fill(operand, i);
  });
  pool_->barrier().wait();
  return operand;
}

}  // namespace outrider
