// A decoder as a list of operations over float32 rows, run by all threads in step with one another.
//
// Between two operations that depend on one another stands a barrier. Within one, a thread begins with the portion of its
// number and takes others from a counter, so that one that is held up holds up little; who computes a portion does not
// change its bits. While it does not multiply, it asks for the weights that it will begin its next products with.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "ahead.h"
#include "attend.h"
#include "draw.h"
#include "linear.h"
#include "norm.h"
#include "pool.h"
#include "screen.h"

namespace outrider {

// From so many rows on, threads share the work of laying out an operand; below, each does it for itself, which costs
// less than waiting for one another.
constexpr int64_t kSharedRows = 24;

// Rows of float32 of one width; grown as batches need.
enum BufferId : int32_t { kResidual = 0, kWide = 1, kAttended = 2, kHidden = 3, kBranch = 4, kBuffers = 5 };

enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2 };

struct Embed {
  const BF16* table16;  // one of the two is null
  const float* table32;
  int64_t width;
  float scale;
};

struct Linear {
  const Weight* weight;
  const Weight* narrow;  // a copy of it in fewer bits, for steps that draft; null where they read the weight itself
  const float* bias;  // [outputs] or null
  Norm norm;          // of the input
  BufferId input, output;
  int64_t input_width, output_width;
  bool add;               // to what the output holds
  Activation activation;  // of gated pairs: outputs come as 16 gates, 16 values, ...
  bool head;              // of sampled rows alone, into the caller's logits
  float softcap;          // of the head; 0 is off
  Screen screen;          // of the head, if it has one
  size_t operation;               // which of the program's this is
  size_t place;                   // among the program's products
  bool feeds = false;             // of gated pairs: the next operation's operand, as its outputs come
  bool fed = false;               // by the operation before it
  std::vector<int64_t> portions;  // first panels of what a thread takes at once, and the end
};

// output += norm(input), for models that normalise what a branch adds.
struct AddNorm {
  Norm norm;
  BufferId input, output;
  int64_t width;
};

// Queries, keys and values of a row stand side by side in kWide; they are turned in place, and keys and values stored.
struct Rotate {
  int32_t layer;
  int64_t heads, kv_heads, key_dim, value_dim, turned;  // `turned`: leading numbers of a head that are turned
  const float* cosines;                                 // [positions, turned / 2]
  const float* sines;
  Norm query_norm, key_norm;  // of each head
};

struct Attend {
  int32_t layer;
  AttentionShape shape;
  int32_t plan;  // which of the program's plans; layers of like heads share one
};

// A copy of the residual stream, normalised if there is a norm, into the caller's features if it wants this mark: in the
// format that is computed in.
struct Capture {
  int32_t mark;
  int64_t width;
  Norm norm;
};

// A copy of every row's residual stream into the pool of states, from `column` on, for a head that follows.
struct Keep {
  int64_t column, width;
};

// Of a head, see follow.cpp: kHidden = the row's state in the pool.
struct Feed {
  int64_t width;
};

// Of a head: kHidden = [norm(embedding), norm(residual)] side by side.
struct Join {
  const BF16* table16;  // one of the two is null
  const float* table32;
  int64_t width;
  Norm embedding, state;
  bool after_norm;  // the normalised state is the residual stream from here on
};

using Operation = std::variant<Embed, Linear, AddNorm, Rotate, Attend, Capture, Keep, Feed, Join>;

struct Call {
  Batch batch;  // of one step
  const void* const* keys;  // [layers], pools
  const void* const* values;
  void* states;  // the pool of states, as wide as they are together, in the format that is computed in; null for none
  int64_t state_width;
  float* logits;  // [sampled_rows, vocab]
  const DrawCall* draws;  // of the first of them; null for none. If all are drawn from, logits may be a screen's
  const int64_t* columns;  // [marks], first column of each captured state, or -1; null if none is wanted
  const int64_t* captured;  // [captured_rows]
  int64_t captured_rows;
  void* features;  // [captured_rows, feature_width], bfloat16 or float
  int64_t feature_width;
  const Weight* fusion;  // what the captured rows are multiplied with at last; null for nothing
  const float* fusion_bias;  // [outputs] or null
  void* fused;  // [captured_rows, outputs], as the features
};

// Plain steps of the same sessions, one behind the other: each one's rows are the tokens that the one before it drew.
struct Burst {
  int64_t steps;              // at most
  const int64_t* stops;       // tokens after which a session does not go on, row after row
  const int64_t* stop_counts;  // [rows], how many of them are each one's
  const int32_t* files;       // what can be read as soon as the caller is wanted elsewhere
  int64_t file_count;
  bool narrow;                // with the narrow copies of the weights: what is drawn are drafts
  uint32_t* const* texts;     // [rows], tokens of the sessions, with room for those of the burst
  const int64_t* lengths;     // [rows], of them
  int64_t same;               // ends, too, once so many last tokens of a session stood in its text before; 0 for never
  bool follows;               // of a head: the first step's rows are committed tokens; see follow.cpp
  const float* odds;          // of a head, [2, 16]: chances of a token by its probability, greedy sessions first; or null
  double next, row, step;     // seconds that a guess brings if those before it are right, and that it takes
};

// Whether somebody calls: one of some files can be read.
class Listener {
 public:
  Listener(const int32_t* files, int64_t count) {
    for (int64_t i = 0; i < count; ++i) files_.push_back({files[i], POLLIN, 0});
  }
  bool called() const { return !files_.empty() && poll(files_.data(), files_.size(), 0) > 0; }

 private:
  mutable std::vector<pollfd> files_;
};

// True if the last `same` tokens of a text stand in it before.
bool stood_before(const uint32_t* text, int64_t length, int64_t same);

// That a guess is right of which a head says that it is so probable. odds: [2, 16], of greedy sessions first
inline double chance_of(const float* odds, float said, bool greedy) {
  constexpr int64_t kBins = 16;
  return odds[std::clamp<int64_t>(int64_t(said * kBins), 0, kBins - 1) + (greedy ? 0 : kBins)];
}

// How far guesses are still right, and whether another one is worth its time.
class Confidence {
 public:
  Confidence(const Burst& burst, int64_t sessions) : burst_(burst), reach_(sessions, 1.0) {}

  bool goes_on(const DrawCall& draws) {
    if (burst_.odds == nullptr) return true;
    double gain = 0.0;
    for (size_t i = 0; i < reach_.size(); ++i) {
      reach_[i] *= chance_of(burst_.odds, draws.odds[2 * i], draws.sessions[i].temperature == 0.0);
      gain += std::max(0.0, reach_[i] * burst_.next - burst_.row);
    }
    return gain > burst_.step;
  }

 private:
  const Burst& burst_;
  std::vector<double> reach_;
};

class Program {
 public:
  // beside: a program whose threads it shares, as long as they never run at once; null for threads of its own.
  Program(int threads, bool bfloat16, PoolFormat pools, const Program* beside = nullptr);
  void add(Operation operation);
  void screen(const Screen& screen) { std::get<Linear>(operations_[head_]).screen = screen; }
  void narrow(const Weight& weight) { std::get<Linear>(operations_.back()).narrow = &weight; }
  int32_t plan_of(const AttentionShape& shape);
  void set_width(BufferId buffer, int64_t width) { widths_[buffer] = std::max(widths_[buffer], width); }
  void run(const Call& call);
  void run_narrow(const Call& call);  // with the narrow copies of the weights
  // Ends early behind a step in which a session does or a text repeats, or in which the caller is called. Draws, and
  // captured rows, lie step behind step. Every span is a row, each row is drawn from, and nothing is fused. Returns how
  // many steps were computed.
  int64_t run(Call call, const Burst& burst, Confidence* confidence = nullptr);
  int64_t follow(Call call, const Burst& burst);

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };

  void prepare(const Call& call);
  void look_ahead();
  void work(int thread, const Call& call);
  void fetch_ahead(int thread, size_t operation) const;
  void wait(int thread) {
    pool_->barrier().wait([this, thread] { ahead_[thread].bring(Ahead::kWaiting); });
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
  void execute(const Keep& op, int thread, const Call& call, Counter* next);
  void execute(const Feed& op, int thread, const Call& call, Counter* next);
  void execute(const Join& op, int thread, const Call& call, Counter* next);
  bool skips(const Operation& operation, const Call& call) const;
  template <class T>
  void capture(const Capture& op, const Call& call, int64_t index, T* to);
  const Weight& weight_of(const Linear& op) const {
    if (narrow_ && op.narrow) return *op.narrow;
    return op.head && screened_ ? *op.screen.weight : *op.weight;
  }
  bool may_screen(const Call& call) const;
  void draw(int thread);
  void prepare_screen();
  void draw_screened(int thread, const Call& call);
  Bounds bounds_of_row(const Linear& op, int thread, const Call& call, int64_t row);
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
  const bool bfloat16_;  // keys and queries are multiplied in it, and states captured, else in float32
  const PoolFormat pools_;
  std::vector<Operation> operations_;
  size_t products_ = 0;    // how many of them are
  size_t head_ = 0;        // which of them is the head
  bool narrow_ = false;    // this call drafts
  size_t join_ = 0;        // where a head goes on with states of its own
  size_t begin_ = 0;       // which operation this call begins with
  bool screened_ = false;  // the logits of this call are those of its screen
  bool all_greedy_ = true;
  ScreenWorth worth_;
  Panels panels_;
  std::vector<ScreenedRow> screened_rows_;
  std::vector<AttentionShape> shapes_;
  std::vector<AttentionPlan> plans_;
  std::optional<Draws> draws_;
  static constexpr int kScreenCounters = 8;
  std::vector<Counter> counters_;  // two an operation, two for the fusion, those of a screen, one for the draws
  std::vector<int64_t> slots_;     // of the batch's rows
  std::vector<int32_t> spans_;     // of the batch's rows
  int64_t widths_[kBuffers] = {};
  Buffer buffers_[kBuffers];
  int64_t capacity_ = 0;  // rows that the buffers hold
  std::vector<Ahead> ahead_;     // of each thread
  std::vector<Buffer> scratch_;  // a thread's own operand
  Buffer shared_;                // an operand that all threads fill
  Buffer fed_;                   // one that is filled as its numbers come
  Buffer partials_;
};

template <class T>
void copy_as(T* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i, lanes(count - i)), lanes(count - i));
}

// True if a token ends its session, or none could be drawn.
bool ends(const Burst& burst, const int64_t* tokens, int64_t rows);

// fill(operand, row): lays a row out
template <class Fill>
Operand Program::operand_of(const Weight& weight, int thread, Counter* next, int64_t rows, Fill&& fill) {
  if (rows <= kSharedRows) {
    const Operand operand = operand_in(scratch_[thread].as<char>(), weight, rows);
    for (int64_t i = 0; i < rows; ++i) {
      fill(operand, i);
      ahead_[thread].bring(Ahead::kRow);
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
