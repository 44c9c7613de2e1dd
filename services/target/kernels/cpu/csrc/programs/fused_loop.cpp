#include "fused_loop.h"

#include <chrono>

#include "attention/kv_move.h"

namespace outrider {

namespace {

// The draft nodes of an iteration: a chain, and after it second choices beside its first tokens.
struct DraftNodes {
  std::vector<int64_t> tokens;
  std::vector<int32_t> parents;  // index among the nodes; -1 is the root
  std::vector<int64_t> depths;  // the root has depth 0

  void add(int64_t token, int64_t depth) {
    tokens.push_back(token);
    parents.push_back(int32_t(depth) - 2);  // the chain's node at depth - 1
    depths.push_back(depth);
  }
  int64_t child(int64_t of, int64_t token) const {
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (parents[i] == of && tokens[i] == token) return int64_t(i);
    }
    return -1;
  }
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class LoopSession {
 public:
  LoopSession(Program& model, Program* head, const Call& call, const FusedLoop& loop)
      : model_(model), head_(head), call_(call), loop_(loop), interrupts_(loop.interrupt_fds, loop.interrupt_fd_count),
        length_(loop.length), head_tokens_(loop.head_tokens), inner_(loop.inner), room_(loop.room) {}

  bool interrupted() const { return interrupts_.interrupted(); }

  // Runs one iteration. Returns whether another one may follow.
  bool iterate(LoopIteration& result) {
    result = LoopIteration{};
    const bool continues = loop_.chain ? draft_with_copy(result) : draft_and_verify(result);
    result.head_tokens = std::min(head_tokens_, length_ - 2);  // rows after a rejected token belong to another text
    return continues && loop_.room - committed_ > 1 && !repeats();
  }

 private:
  // An iteration with one level of verification: by the decoder, or by its narrow copy.
  bool draft_and_verify(LoopIteration& result) {
    const double began = now();
    draft(result);
    return settle(choose(result), result, began);
  }

  // The copy continues as if its tokens were committed; then the decoder verifies them as a chain.
  bool draft_with_copy(LoopIteration& result) {
    const double began = now();
    const int64_t length = length_, committed = committed_;
    room_ = std::min(committed_ + loop_.longest, loop_.room - 1);
    narrow_ = true;
    for (bool continues = true; continues && committed_ < std::min(committed + loop_.chain, room_);) {
      LoopIteration& one = inner_[result.inner++] = LoopIteration{};
      continues = draft_and_verify(one) && !interrupted();
    }
    inner_ += result.inner;
    narrow_ = false;
    room_ = loop_.room;
    DraftNodes nodes;
    for (int64_t place = length; place < length_ && loop_.tokens[committed + place - length] >= 0; ++place) {
      nodes.add(loop_.text[place], place - length + 1);
    }
    length_ = length, committed_ = committed;
    result.draft_tokens = result.chain = int64_t(nodes.tokens.size());
    return settle(nodes, result, began);
  }

  // began: time before drafting
  bool settle(const DraftNodes& nodes, LoopIteration& result, double began) {
    const double drafted = now();
    verify(nodes);
    const bool continues = accept(nodes, result);
    result.drafting = drafted - began;
    result.verifying = now() - drafted;
    return continues;
  }

  bool greedy() const { return loop_.sampling->temperature == 0.0; }
  bool is_stop(int64_t token) const {
    return std::find(loop_.stops, loop_.stops + loop_.stop_count, token) != loop_.stops + loop_.stop_count;
  }
  bool repeats() const {
    return loop_.repeat_length && length_ > loop_.repeat_length && occurs_earlier(loop_.text, length_, loop_.repeat_length);
  }

  int64_t slot(int64_t key) const {
    return int64_t{loop_.pages[key / loop_.page_size]} * loop_.page_size + key % loop_.page_size;
  }

  // A call with one span of the session: start tokens in the cache, committed rows, then draft nodes.
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

  void draft(LoopIteration& result) {
    const int64_t depth = std::min({loop_.depth, room_ - committed_ - 1, kChain});
    if (depth < 1) return;
    const int64_t last = length_ - 1, first = std::min(head_tokens_, last - 1);
    std::vector<int64_t> ids(loop_.text + first + 1, loop_.text + length_), positions(ids.size());
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = first + int64_t(i);
    const std::vector<int64_t> sampled{int64_t(ids.size()) - 1};
    Call call = call_of(ids, positions, sampled, first, int64_t(ids.size()), nullptr);
    const int64_t one = 1;
    const SampleCall samples{loop_.head_logits, 1, loop_.head_vocab, loop_.sampling, &one, &length_, nullptr, nullptr,
                             draft_tokens_, second_tokens_, loop_.head_ids, result.probabilities[0]};
    call.logits = loop_.head_logits;
    call.samples = &samples;
    MultiStep multi_step{};
    multi_step.steps = depth;
    multi_step.stops = loop_.stops, multi_step.stop_counts = &loop_.stop_count;
    multi_step.draft_chain = true;
    multi_step.acceptance_rates = loop_.acceptance_rates;
    multi_step.token_gain = loop_.token_gain, multi_step.row_cost = loop_.row_cost, multi_step.step_cost = loop_.step_cost;
    result.written = int64_t(ids.size());
    result.draft_tokens = head_->draft_chain(call, multi_step);
    head_tokens_ = last;
  }

  // Chooses the draft tokens to verify; the plain twin is LocalEagleHead._chosen.
  DraftNodes choose(LoopIteration& result) const {
    const double least = loop_.row_cost / loop_.token_value;
    double reach = 1.0;
    DraftNodes nodes;
    std::vector<int64_t> with_second;
    for (int64_t i = 0; i < result.draft_tokens && draft_tokens_[i] >= 0; ++i) {
      const double rate = acceptance_rate(loop_.acceptance_rates, result.probabilities[i][0], greedy());
      if (i && reach * rate < least) break;  // the first one is always verified: a step of one row costs as much
      if (i < loop_.max_second_choices && second_tokens_[i] >= 0) {
        const double second = acceptance_rate(loop_.second_acceptance_rates, result.probabilities[i][1], greedy());
        const double score = reach * (1.0 - rate) * second;
        if (score >= least) with_second.push_back(i);
      }
      reach *= rate;
      nodes.add(draft_tokens_[i], i + 1);
      if (is_stop(draft_tokens_[i])) break;
    }
    result.chain = int64_t(nodes.tokens.size());
    for (const int64_t i : with_second) {
      nodes.add(second_tokens_[i], i + 1);
      result.second_choices |= int64_t{1} << i;
    }
    return nodes;
  }

  void verify(const DraftNodes& nodes) {
    const int64_t rows = int64_t(nodes.tokens.size()) + 1;
    std::vector<int64_t> ids{int64_t(loop_.text[length_ - 1])}, positions{length_ - 1}, sampled(rows);
    std::vector<int64_t> sample_positions{length_};
    for (int64_t i = 0; i < rows; ++i) sampled[i] = i;
    for (int64_t i = 0; i + 1 < rows; ++i) {
      ids.push_back(nodes.tokens[i]);
      positions.push_back(length_ - 1 + nodes.depths[i]);
      sample_positions.push_back(length_ + nodes.depths[i]);
    }
    Call call = call_of(ids, positions, sampled, length_ - 1, 1, nodes.parents.data());
    const SampleCall samples{call_.logits, rows, loop_.vocab, loop_.sampling, &rows, sample_positions.data(), nullptr,
                             nullptr, sampled_tokens_, nullptr, nullptr, nullptr};
    call.samples = &samples;
    narrow_ ? model_.run_narrow(call) : model_.run(call);
  }

  // Commits the accepted path and the bonus token. Returns whether the session continues.
  bool accept(const DraftNodes& nodes, LoopIteration& result) {
    std::vector<int64_t> sources, destinations;
    const int64_t base = length_;
    for (int64_t at = -1;;) {
      const int64_t token = sampled_tokens_[at + 1];
      const int64_t child = token < 0 ? -1 : nodes.child(at, token);
      loop_.tokens[committed_++] = token;
      ++result.committed;
      loop_.text[length_++] = uint32_t(token);
      if (child >= 0) {
        if (child != result.accepted) {
          sources.push_back(slot(base + child));
          destinations.push_back(slot(base + result.accepted));
        }
        ++result.accepted;
        result.chain_accepted += child < result.chain;
      }
      const bool ends = token < 0 || is_stop(token) || committed_ == room_;
      if (child < 0 || ends) {
        move_rows(loop_.pools, loop_.row_bytes, loop_.pool_count, sources.data(), destinations.data(),
                  int64_t(sources.size()));
        return !ends;
      }
      at = child;
    }
  }

  Program& model_;
  Program* head_;
  const Call& call_;
  const FusedLoop& loop_;
  const InterruptPoll interrupts_;
  int64_t length_, head_tokens_, committed_ = 0;
  LoopIteration* inner_;  // results of the next inner iterations
  int64_t room_;  // most committed tokens at the end of the current iteration
  bool narrow_ = false;  // the current iteration verifies with the copy
  int64_t span_[2] = {0, 0}, start_ = 0, committed_rows_ = 0, table_ = 0;
  int64_t draft_tokens_[kChain], second_tokens_[kChain], sampled_tokens_[2 * kChain + 1];
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
