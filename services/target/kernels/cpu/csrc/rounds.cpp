#include "rounds.h"

#include <chrono>

#include "moves.h"

namespace outrider {

namespace {

// The nodes of a round: a chain, and behind it second guesses beside the first of it.
struct Nodes {
  std::vector<int64_t> tokens;
  std::vector<int32_t> parents;  // among the nodes; -1 is the root
  std::vector<int64_t> depths;   // of the root 0

  void add(int64_t token, int64_t depth) {
    tokens.push_back(token);
    parents.push_back(int32_t(depth) - 2);  // in the chain
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

class Session {
 public:
  Session(Program& model, Program* head, const Call& call, const Rounds& rounds)
      : model_(model), head_(head), call_(call), rounds_(rounds), listener_(rounds.files, rounds.file_count),
        length_(rounds.length), known_(rounds.known), within_(rounds.within), room_(rounds.room) {}

  bool called() const { return listener_.called(); }

  // Returns whether another round may follow.
  bool round(Round& told) {
    told = Round{};
    const bool goes_on = rounds_.chain ? draft_and_verify(told) : guess_and_verify(told);
    told.known = std::min(known_, length_ - 2);  // behind a wrong token the head's rows are of another text
    return goes_on && rounds_.room - committed_ > 1 && !repeats();
  }

 private:
  // A round of the decoder, or of its copy.
  bool guess_and_verify(Round& told) {
    const double began = now();
    guess(told);
    return settle(choose(told), told, began);
  }

  // The copy goes on as if its tokens were committed; then they are the chain that is verified.
  bool draft_and_verify(Round& told) {
    const double began = now();
    const int64_t length = length_, committed = committed_;
    room_ = std::min(committed_ + rounds_.longest, rounds_.room - 1);
    narrow_ = true;
    for (bool goes_on = true; goes_on && committed_ < std::min(committed + rounds_.chain, room_);) {
      Round& one = within_[told.within++] = Round{};
      goes_on = guess_and_verify(one) && !called();
    }
    within_ += told.within;
    narrow_ = false;
    room_ = rounds_.room;
    Nodes nodes;
    for (int64_t place = length; place < length_ && rounds_.tokens[committed + place - length] >= 0; ++place) {
      nodes.add(rounds_.text[place], place - length + 1);
    }
    length_ = length, committed_ = committed;
    told.guesses = told.chain = int64_t(nodes.tokens.size());
    return settle(nodes, told, began);
  }

  // began: when the nodes were yet to be guessed
  bool settle(const Nodes& nodes, Round& told, double began) {
    const double guessed = now();
    verify(nodes);
    const bool goes_on = accept(nodes, told);
    told.guessing = guessed - began;
    told.verifying = now() - guessed;
    return goes_on;
  }

  bool greedy() const { return rounds_.sampling->temperature == 0.0; }
  bool is_stop(int64_t token) const {
    return std::find(rounds_.stops, rounds_.stops + rounds_.stop_count, token) != rounds_.stops + rounds_.stop_count;
  }
  bool repeats() const {
    return rounds_.same && length_ > rounds_.same && stood_before(rounds_.text, length_, rounds_.same);
  }

  int64_t slot(int64_t key) const {
    return int64_t{rounds_.pages[key / rounds_.page_size]} * rounds_.page_size + key % rounds_.page_size;
  }

  // A span of the session: tokens in the cache, rows that are committed, nodes behind them.
  Call call_of(const std::vector<int64_t>& ids, const std::vector<int64_t>& positions, const std::vector<int64_t>& sampled,
               int64_t start, int64_t committed, const int32_t* parents) {
    span_[1] = int64_t(ids.size());
    start_ = start, committed_rows_ = committed;
    const BatchView view{span_[1], 1, int64_t(sampled.size()), rounds_.page_size, ids.data(), positions.data(),
                         sampled.data(), span_, &start_, &committed_rows_, parents, rounds_.pages, &table_};
    Call call = call_;
    call.batch = Batch(view);
    return call;
  }

  void guess(Round& told) {
    const int64_t depth = std::min({rounds_.depth, room_ - committed_ - 1, kChain});
    if (depth < 1) return;
    const int64_t last = length_ - 1, first = std::min(known_, last - 1);
    std::vector<int64_t> ids(rounds_.text + first + 1, rounds_.text + length_), positions(ids.size());
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = first + int64_t(i);
    const std::vector<int64_t> sampled{int64_t(ids.size()) - 1};
    Call call = call_of(ids, positions, sampled, first, int64_t(ids.size()), nullptr);
    const int64_t one = 1;
    const DrawCall draws{rounds_.head_logits, 1, rounds_.head_vocab, rounds_.sampling, &one, &length_, nullptr, nullptr,
                         guesses_, seconds_, rounds_.head_ids, told.odds[0]};
    call.logits = rounds_.head_logits;
    call.draws = &draws;
    Burst burst{};
    burst.steps = depth;
    burst.stops = rounds_.stops, burst.stop_counts = &rounds_.stop_count;
    burst.follows = true;
    burst.odds = rounds_.odds;
    burst.next = rounds_.next, burst.row = rounds_.row, burst.step = rounds_.step;
    told.written = int64_t(ids.size());
    told.guesses = head_->follow(call, burst);
    known_ = last;
  }

  // Which guesses are verified: the plain twin is HeadDraft._chosen.
  Nodes choose(Round& told) const {
    const double least = rounds_.row / rounds_.token;
    double reach = 1.0;
    Nodes nodes;
    std::vector<int64_t> others;
    for (int64_t i = 0; i < told.guesses && guesses_[i] >= 0; ++i) {
      const double chance = chance_of(rounds_.odds, told.odds[i][0], greedy());
      if (i && reach * chance < least) break;  // the first is verified in any case: a step of a row costs as much
      if (i < rounds_.others && seconds_[i] >= 0) {
        const double score = reach * (1.0 - chance) * chance_of(rounds_.second_odds, told.odds[i][1], greedy());
        if (score >= least) others.push_back(i);
      }
      reach *= chance;
      nodes.add(guesses_[i], i + 1);
      if (is_stop(guesses_[i])) break;
    }
    told.chain = int64_t(nodes.tokens.size());
    for (const int64_t i : others) {
      nodes.add(seconds_[i], i + 1);
      told.beside |= int64_t{1} << i;
    }
    return nodes;
  }

  void verify(const Nodes& nodes) {
    const int64_t rows = int64_t(nodes.tokens.size()) + 1;
    std::vector<int64_t> ids{int64_t(rounds_.text[length_ - 1])}, positions{length_ - 1}, sampled(rows), drawn{length_};
    for (int64_t i = 0; i < rows; ++i) sampled[i] = i;
    for (int64_t i = 0; i + 1 < rows; ++i) {
      ids.push_back(nodes.tokens[i]);
      positions.push_back(length_ - 1 + nodes.depths[i]);
      drawn.push_back(length_ + nodes.depths[i]);
    }
    Call call = call_of(ids, positions, sampled, length_ - 1, 1, nodes.parents.data());
    const DrawCall draws{call_.logits, rows, rounds_.vocab, rounds_.sampling, &rows, drawn.data(), nullptr, nullptr,
                         drawn_, nullptr, nullptr, nullptr};
    call.draws = &draws;
    narrow_ ? model_.run_narrow(call) : model_.run(call);
  }

  // Commits what the walk meets and the token behind it. Returns whether the session goes on.
  bool accept(const Nodes& nodes, Round& told) {
    std::vector<int64_t> sources, destinations;
    const int64_t base = length_;
    for (int64_t at = -1;;) {
      const int64_t token = drawn_[at + 1];
      const int64_t child = token < 0 ? -1 : nodes.child(at, token);
      rounds_.tokens[committed_++] = token;
      ++told.committed;
      rounds_.text[length_++] = uint32_t(token);
      if (child >= 0) {
        if (child != told.accepted) {
          sources.push_back(slot(base + child));
          destinations.push_back(slot(base + told.accepted));
        }
        ++told.accepted;
        told.right += child < told.chain;
      }
      const bool ends = token < 0 || is_stop(token) || committed_ == room_;
      if (child < 0 || ends) {
        move_rows(rounds_.pools, rounds_.row_bytes, rounds_.pool_count, sources.data(), destinations.data(),
                  int64_t(sources.size()));
        return !ends;
      }
      at = child;
    }
  }

  Program& model_;
  Program* head_;
  const Call& call_;
  const Rounds& rounds_;
  const Listener listener_;
  int64_t length_, known_, committed_ = 0;
  Round* within_;         // where the next rounds of the copy are told
  int64_t room_;          // for tokens of the round at hand and those before it
  bool narrow_ = false;   // the round at hand is the copy's
  int64_t span_[2] = {0, 0}, start_ = 0, committed_rows_ = 0, table_ = 0;
  int64_t guesses_[kChain], seconds_[kChain], drawn_[2 * kChain + 1];
};

}  // namespace

int64_t run_rounds(Program& model, Program* head, const Call& call, const Rounds& rounds) {
  Session session(model, head, call, rounds);
  const double end = now() + rounds.seconds;
  for (int64_t done = 0;;) {
    const bool goes_on = session.round(rounds.told[done++]);
    if (!goes_on || done == rounds.most || now() >= end || session.called()) return done;
  }
}

}  // namespace outrider
