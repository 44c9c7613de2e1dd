#include "fused_loop.h"

#include <chrono>
#include <numeric>

namespace outrider {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class LoopSession {
 public:
  LoopSession(Program& model, Program* head, const Call& call, const FusedLoop& loop)
      : model_(model), head_(head), call_(call), loop_(loop), interrupts_(loop.interrupt_fds, loop.interrupt_fd_count),
        length_(loop.length), head_tokens_(loop.head_tokens) {}

  bool interrupted() const { return interrupts_.interrupted(); }

  // Runs one iteration. Returns whether another one may follow.
  bool iterate(LoopIteration& result) {
    result = LoopIteration{};
    const double began = now();
    const int64_t depth = std::min({loop_.depth, loop_.room - committed_ - 1, kChain});
    head_ ? draft_with_head(depth, result) : draft_with_copy(depth, result);
    choose(result);
    const double drafted = now();
    verify(result.verified);
    const bool continues = accept(result);
    result.drafting = drafted - began;
    result.verifying = now() - drafted;
    result.head_tokens = std::min(head_tokens_, length_ - 2);  // rows after a rejected token belong to another text
    return continues && loop_.room - committed_ > 1 && !repeats();
  }

 private:
  bool is_stop(int64_t token) const {
    return std::find(loop_.stops, loop_.stops + loop_.stop_count, token) != loop_.stops + loop_.stop_count;
  }
  bool repeats() const {
    return loop_.repeat_length && length_ > loop_.repeat_length && occurs_earlier(loop_.text, length_, loop_.repeat_length);
  }

  // A call with one span of the session: start tokens in the cache, committed rows, then draft tokens.
  Call call_of(const std::vector<int64_t>& ids, const std::vector<int64_t>& positions, const std::vector<int64_t>& sampled,
               int64_t start, int64_t committed, const int32_t* parents) {
    span_[1] = int64_t(ids.size());
    start_ = start, committed_rows_ = committed;
    const BatchView view{span_[1], 1, int64_t(sampled.size()), loop_.page_size, ids.data(), positions.data(),
                         sampled.data(), span_, &start_, &committed_rows_, parents, loop_.pages, &table_};
    Call call = call_;
    call.batch = Batch(view);
    return call;
  }
  MultiStep steps_of(int64_t depth) const {
    MultiStep steps{};
    steps.steps = depth;
    steps.stops = loop_.stops, steps.stop_counts = &loop_.stop_count;
    return steps;
  }

  void draft_with_head(int64_t depth, LoopIteration& result) {
    const int64_t last = length_ - 1, first = std::min(head_tokens_, last - 1);
    const std::vector<int64_t> ids(loop_.text + first + 1, loop_.text + length_), sampled{int64_t(ids.size()) - 1};
    std::vector<int64_t> positions(ids.size());
    std::iota(positions.begin(), positions.end(), first);
    Call call = call_of(ids, positions, sampled, first, int64_t(ids.size()), nullptr);
    const int64_t one = 1;
    const SampleCall samples{loop_.head_logits, 1, loop_.head_vocab, loop_.sampling, &one, &length_, nullptr, nullptr,
                             draft_tokens_, loop_.head_ids, result.probabilities};
    call.logits = loop_.head_logits;
    call.samples = &samples;
    MultiStep steps = steps_of(depth);
    steps.draft_chain = true;
    steps.acceptance_rates = loop_.acceptance_rates;
    steps.token_gain = loop_.token_gain, steps.row_cost = loop_.row_cost, steps.step_cost = loop_.step_cost;
    result.written = int64_t(ids.size());
    result.draft_tokens = head_->draft_chain(call, steps);
    head_tokens_ = last;
  }

  void draft_with_copy(int64_t depth, LoopIteration& result) {
    const std::vector<int64_t> ids{int64_t(loop_.text[length_ - 1])}, positions{length_ - 1}, sampled{0};
    Call call = call_of(ids, positions, sampled, length_ - 1, 1, nullptr);
    const int64_t one = 1;
    const SampleCall samples{call_.logits, 1, loop_.vocab, loop_.sampling, &one, &length_, nullptr, nullptr,
                             draft_tokens_, nullptr, nullptr};
    call.samples = &samples;
    MultiStep steps = steps_of(depth);
    steps.narrow = true;
    steps.interrupt_fds = loop_.interrupt_fds, steps.interrupt_fd_count = loop_.interrupt_fd_count;
    result.draft_tokens = model_.run(call, steps);
  }

  // Chooses how many draft tokens to verify; the plain twin is LocalEagleHead._chosen.
  void choose(LoopIteration& result) const {
    double reach = 1.0;
    for (int64_t i = 0; i < result.draft_tokens && draft_tokens_[i] >= 0; ++i) {
      if (head_) reach *= acceptance_rate(loop_.acceptance_rates, result.probabilities[i], loop_.sampling->temperature == 0.0);
      // The first one is always verified: a step of one row costs as much.
      if (head_ && i && reach < loop_.row_cost / loop_.token_value) return;
      ++result.verified;
      if (is_stop(draft_tokens_[i])) return;
    }
  }

  // count: of draft tokens
  void verify(int64_t count) {
    const int64_t rows = count + 1;
    std::vector<int64_t> ids{int64_t(loop_.text[length_ - 1])}, positions(rows), sampled(rows), sample_positions(rows);
    ids.insert(ids.end(), draft_tokens_, draft_tokens_ + count);
    std::iota(positions.begin(), positions.end(), length_ - 1);
    std::iota(sampled.begin(), sampled.end(), 0);
    std::iota(sample_positions.begin(), sample_positions.end(), length_);
    std::vector<int32_t> parents(count);
    std::iota(parents.begin(), parents.end(), -1);
    Call call = call_of(ids, positions, sampled, length_ - 1, 1, parents.data());
    const SampleCall samples{call_.logits, rows, loop_.vocab, loop_.sampling, &rows, sample_positions.data(), nullptr,
                             nullptr, sampled_tokens_, nullptr, nullptr};
    call.samples = &samples;
    model_.run(call);
  }

  // Commits the accepted draft tokens and the bonus token. Returns whether the session continues.
  bool accept(LoopIteration& result) {
    for (;;) {
      const int64_t token = sampled_tokens_[result.accepted];
      const bool accepted = result.accepted < result.verified && token == draft_tokens_[result.accepted];
      loop_.tokens[committed_++] = token;
      loop_.text[length_++] = uint32_t(token);
      ++result.committed;
      result.accepted += accepted;
      const bool ends = token < 0 || is_stop(token) || committed_ == loop_.room;
      if (!accepted || ends) return !ends;
    }
  }

  Program& model_;
  Program* head_;
  const Call& call_;
  const FusedLoop& loop_;
  const InterruptPoll interrupts_;
  int64_t length_, head_tokens_, committed_ = 0;
  int64_t span_[2] = {0, 0}, start_ = 0, committed_rows_ = 0, table_ = 0;
  int64_t draft_tokens_[kChain], sampled_tokens_[kChain + 1];
};

}  // namespace

int64_t run_fused_loop(Program& model, Program* head, const Call& call, const FusedLoop& loop) {
  LoopSession session(model, head, call, loop);
  const double end = now() + loop.seconds;
  for (int64_t done = 0;;) {
    const bool continues = session.iterate(loop.results[done++]);
    if (!continues || done == loop.max_iterations || now() >= end || session.interrupted()) return done;
  }
}

}  // namespace outrider
