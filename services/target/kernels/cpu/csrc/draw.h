// Drawing tokens: the rules of outrider/speculation/sampling.py, row by row. A row's token depends on that row alone.
//
//   survey   one pass over the logits: the best one, and the maxima of groups of 16
//   filters  the few tokens that may be kept, in order; which of them are
//   race     argmax(logit / temperature + noise): almost every token is ruled out by a bound in float32
//
// A token's noise beats a lead of d with the chance 1 - exp(-exp(-d)) < exp(-d). So a token whose uniform number is not
// within exp(-d) of 1 has lost, which is seen without a logarithm; what is left is weighed in float64.
#pragma once

#include <algorithm>
#include <vector>

#include "noise.h"
#include "survey.h"

namespace outrider {

// How the rows of a session are drawn. Off are: temperature 0 (greedy), top_k 0, top_p 1, min_p 0.
struct Sampling {
  double temperature, top_p, min_p;
  int64_t top_k;
  uint64_t seed;
};

// Tokens compete by logit / temperature + noise; of equals the lowest id wins. Each may enter more than once.
class Race {
 public:
  Race(NoiseKey key, double temperature, const Survey& survey)
      : key_(key), temperature_(temperature), best_(survey.best), token_(survey.token), score_(weigh(best_, token_)) {
    set_lead();
  }

  int64_t token() const { return token_; }
  // A logit below this cannot win any more.
  float least() const { return below(best_ + (lead_ - kMostNoise) * temperature_); }

  void enter(Floats logits, Ints tokens) {
    if (const Mask won = reaches(logits, tokens)) weigh_all(logits, tokens, won);
  }

  // Those that may win, as far as float32 tells; with larger logits no fewer.
  Mask reaches(Floats logits, Ints tokens) const {
    const Floats ahead = mul(sub(logits, floats(best_)), floats(inverse_));
    const Floats needed = sub(ahead, floats(lead_));
    const Mask near = greater_equal(needed, floats(-kMostNoise));
    if (!near) return 0;
    const Ints bits = noise_bits(key_, tokens);
    const Floats rest = to_floats_unsigned(bit_xor(bits, ints(-1)));
    // 1 - u = (rest + 0.5) / 2^32 must lie within exp(needed).
    const Floats chance = mul(exp(needed), floats(0x1p32f));
    return Mask(near & less_equal(rest, chance));
  }

 private:
  // Larger than the errors of float32 above, for logits within reach.
  static constexpr double kMargin = 1e-3;

  double weigh(float logit, int64_t token) const {
    const double ahead = double(logit) / temperature_ - double(best_) / temperature_;
    return ahead + double(gumbel(noise_bits(key_, uint32_t(token))));
  }
  void set_lead() { lead_ = float(score_ - kMargin); }

  __attribute__((noinline)) void weigh_all(Floats logits, Ints tokens, Mask which) {
    alignas(64) float logit[kLanes];
    alignas(64) int32_t token[kLanes];
    store(logit, logits);
    store(token, tokens);
    for (unsigned rest = which; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      const double score = weigh(logit[lane], token[lane]);
      if (score < score_ || (score == score_ && token[lane] >= token_)) continue;
      score_ = score;
      token_ = token[lane];
      set_lead();
    }
  }

  const NoiseKey key_;
  const double temperature_;
  const float inverse_ = float(1.0 / temperature_);
  const float best_;  // of the logits
  int64_t token_;
  double score_;  // of the winner so far; the best logit without noise has 0
  float lead_;    // about the same
};

// Draws the tokens of one row after another, in memory of its own.
class Drawer {
 public:
  // -1 where logits are not finite.
  int64_t draw(const LogitRow& row, Sampling how, int64_t position) {
    survey_.take(row);
    if (survey_.token < 0 || how.temperature == 0.0) return survey_.token;
    if (how.top_k >= row.vocab) how.top_k = 0;
    Race race(noise_key(how.seed, uint64_t(position)), how.temperature, survey_);
    if (how.top_k == 0 && how.top_p >= 1.0 && how.min_p <= 0.0) {
      enter_all(row, race);
    } else {
      const int64_t kept = how.top_k || how.top_p < 1.0 ? keep_first(row, how) : keep_likely(row, how);
      for (int64_t i = 0; i < kept; i += kLanes) {
        const Mask mask = lanes(kept - i);
        const Floats logits = load(logits_.data() + i, mask, floats(kNone));
        race.enter(logits, load_ints(tokens_.data() + i, mask));
      }
    }
    return race.token();
  }

 private:
  void enter_all(const LogitRow& row, Race& race) const {
    for (int64_t block = 0; block < survey_.blocks; ++block) {
      if (!survey_.reaches(block, floats(race.least()))) continue;
      for (int64_t i = block * Survey::kBlock; i < (block + 1) * Survey::kBlock; i += kLanes) {
        race.enter(row.at(i), row.ids_at(i));
      }
    }
  }

  // --- candidates: tokens_ and logits_, of which `count_` ---

  // Those whose logit is at least so much, in order of their ids. -inf is none.
  void collect(const LogitRow& row, float least) {
    const Floats limit = floats(std::max(least, std::numeric_limits<float>::lowest()));
    if (int64_t(tokens_.size()) < row.vocab + kLanes) {
      tokens_.resize(row.vocab + kLanes);
      logits_.resize(row.vocab + kLanes);
    }
    count_ = 0;
    for (int64_t block = 0; block < survey_.blocks; ++block) {
      if (!survey_.reaches(block, limit)) continue;
      for (int64_t i = block * Survey::kBlock; i < (block + 1) * Survey::kBlock; i += kLanes) {
        const Floats x = row.at(i);
        const Mask mask = greater_equal(x, limit);
        if (!mask) continue;
        store_kept(logits_.data() + count_, x, mask);
        store_kept(tokens_.data() + count_, row.ids_at(i), mask);
        count_ += __builtin_popcount(mask);
      }
    }
  }

  // Puts candidates in descending order, of equals the lowest id first.
  void sort() {
    keys_.resize(count_);
    for (int64_t i = 0; i < count_; ++i) {
      uint32_t bits;
      const float logit = logits_[i] + 0.0f;  // -0 becomes 0
      std::memcpy(&bits, &logit, sizeof(bits));
      keys_[i] = uint64_t{bits >> 31 ? bits : ~bits & 0x7FFFFFFF} << 32 | uint32_t(tokens_[i]);
    }
    if (count_ <= kFew) std::sort(keys_.begin(), keys_.end());
    else sort_by_digits();
    for (int64_t i = 0; i < count_; ++i) {
      const uint32_t word = uint32_t(keys_[i] >> 32), bits = word >> 31 ? word : ~word & 0x7FFFFFFF;
      std::memcpy(&logits_[i], &bits, sizeof(bits));
      tokens_[i] = int32_t(keys_[i]);
    }
  }

  // By the logits' digits; ids ascend already.
  void sort_by_digits() {
    constexpr int kDigits = 11;
    sorted_.resize(count_);
    for (int shift = 32; shift < 64; shift += kDigits) {
      int64_t place[(1 << kDigits) + 1] = {};
      auto digit = [shift](uint64_t key) { return (key >> shift) & ((1 << kDigits) - 1); };
      for (const uint64_t key : keys_) ++place[digit(key) + 1];
      for (int i = 0; i < 1 << kDigits; ++i) place[i + 1] += place[i];
      for (const uint64_t key : keys_) sorted_[place[digit(key)]++] = key;
      keys_.swap(sorted_);
    }
  }

  // --- filters: how many of the candidates are kept ---

  double weight(float logit, double temperature) const {
    return std::exp((double(logit) - double(survey_.best)) / temperature);
  }
  // A logit whose weight is this, or a little less.
  float logit_of(double weight, double temperature) const {
    return weight > 0.0 ? below(survey_.best + temperature * std::log(weight)) : kNone;
  }

  // min_p alone: nothing need be in order.
  int64_t keep_likely(const LogitRow& row, const Sampling& how) {
    collect(row, std::max(logit_of(how.min_p * (1.0 - kSlack), how.temperature), reach(how)));
    int64_t kept = 0;
    for (int64_t i = 0; i < count_; ++i) {
      if (weight(logits_[i], how.temperature) < how.min_p) continue;
      logits_[kept] = logits_[i];
      tokens_[kept++] = tokens_[i];
    }
    return kept;
  }

  // top_k and top_p, with or without min_p: the first ones in descending order.
  int64_t keep_first(const LogitRow& row, const Sampling& how) {
    Mass mass{};
    const bool nucleus = how.top_p < 1.0;
    if (how.top_k) {
      collect(row, std::max(survey_.least_of(how.top_k), nucleus ? kNone : reach(how)));
    } else {
      mass = mass_of(row, how);
      collect_nucleus(row, how, mass);
    }
    sort();
    const int64_t first = how.top_k ? std::min(how.top_k, count_) : count_;
    if (nucleus && how.top_k) {
      double total = 0.0;
      for (int64_t i = 0; i < first; ++i) total += weight(logits_[i], how.temperature);
      mass = {total, total};
    }
    int64_t kept = nucleus ? count_within(how, first, mass.low) : first;
    if (mass.low < mass.high && count_within(how, first, mass.high) != kept) {
      kept = count_within(how, first, exact_mass(row, how));
    }
    while (how.min_p > 0.0 && kept > 1 && weight(logits_[kept - 1], how.temperature) < how.min_p) --kept;
    return kept;
  }

  // How many of the first candidates have less than top_p of the mass before them.
  int64_t count_within(const Sampling& how, int64_t first, double mass) const {
    double sum = 0.0;
    for (int64_t i = 0; i < first; ++i) {
      const double own = weight(logits_[i], how.temperature);
      sum += own;
      if (!(sum - own < how.top_p * mass)) return i;
    }
    return first;
  }

  // Bounds of a sum of weights.
  struct Mass {
    double low, high;
  };

  // Of all tokens, in float32.
  Mass mass_of(const LogitRow& row, const Sampling& how) const {
    double sum = 0.0;
    for (int64_t block = 0; block < survey_.blocks; ++block) {
      const int64_t first = block * Survey::kBlock;
      sum += rough_weights(how, Survey::kBlock, [&](int64_t i) { return row.at(first + i); });
    }
    return {sum * (1.0 - kSlack), sum * (1.0 + kSlack)};
  }

  double exact_mass(const LogitRow& row, const Sampling& how) const {
    double sum = 0.0;
    alignas(64) float logits[kLanes];
    for (int64_t i = 0; i < row.vocab; i += kLanes) {
      store(logits, row.at(i));
      for (const float logit : logits) sum += logit == kNone ? 0.0 : weight(logit, how.temperature);
    }
    return sum;
  }

  template <class Logits>
  double rough_weights(const Sampling& how, int64_t count, Logits&& logits) const {
    const Floats best = floats(survey_.best), inverse = floats(float(1.0 / how.temperature));
    Floats sum = floats();
    for (int64_t i = 0; i < count; i += kLanes) {
      sum = add(sum, exp(mul(sub(logits(i), best), inverse)));
    }
    return double(sum_of(sum));
  }

  // Every token of the nucleus that the noise can reach, and as few others as some trials tell.
  void collect_nucleus(const LogitRow& row, const Sampling& how, const Mass& mass) {
    const float lowest = reach(how);
    // Tokens that are less likely than this have less than the rest together if there are no more than 64 of them.
    double least = (1.0 - how.top_p) * mass.low / 64.0;
    for (;; least /= 32.0) {
      const float floor = std::max(logit_of(std::min(least, 1.0), how.temperature), lowest);
      collect(row, floor);
      if (floor == lowest || collected(how) > how.top_p * mass.high) return;
    }
  }

  // The candidates' mass, or a little less.
  double collected(const Sampling& how) const {
    double sum = 0.0;
    for (int64_t first = 0; first < count_; first += Survey::kBlock) {
      sum += rough_weights(how, std::min(Survey::kBlock, count_ - first), [&](int64_t i) {
        const Mask mask = lanes(count_ - first - i);
        return load(logits_.data() + first + i, mask, floats(kNone));
      });
    }
    return sum * (1.0 - kSlack);
  }

  // A logit below this loses against the best one whatever the noise.
  float reach(const Sampling& how) const { return below(survey_.best - how.temperature * kNoiseRange); }

  // Of sums in float32, relative to them: far above their errors.
  static constexpr double kSlack = 2e-5;
  // As many are sorted by comparing.
  static constexpr int64_t kFew = 1500;

  Survey survey_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_;
  std::vector<uint64_t> keys_, sorted_;
  int64_t count_ = 0;
};

// What a row's softmax is made of, whatever filters say.
struct Weights {
  const LogitRow& row;
  const double temperature;
  float best = kNone;
  double total = 0.0;

  Weights(const LogitRow& numbers, double heat) : row(numbers), temperature(heat) {
    Floats top = floats(kNone), sum = floats();
    for (int64_t i = 0; i < row.vocab; i += kLanes) top = max(top, row.at(i));
    best = largest_of(top);
    const Floats inverse = floats(float(1.0 / temperature));
    for (int64_t i = 0; i < row.vocab; i += kLanes) {
      const Floats x = row.at(i);
      if (!greater(x, floats(kNone))) continue;
      sum = add(sum, exp(mul(sub(x, floats(best)), inverse)));
    }
    total = sum_of(sum);
  }

  double of(int64_t token) const { return std::exp((double(row.logits[row.place_of(token)]) - double(best)) / temperature); }
};

// Rows after each of which a token is drawn.
struct DrawCall {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const Sampling* sessions;  // how each one's rows are drawn
  const int64_t* counts;     // how many those are
  const int64_t* positions;  // [rows], of the tokens
  const int64_t* masks;      // [rows], which line of `words` says what a row allows, or -1; null if all do all
  const uint32_t* words;     // [lines, ceil(vocab / 32)]
  int64_t* tokens;           // [rows]
  int64_t* seconds;          // [rows], what is drawn if that is not; null for nothing. Logits are overwritten for it
  const int32_t* ids;        // [vocab], as of LogitRow
  float* odds;               // [rows, 2], with seconds: a token's probability, and the second one's if it is not that
};

// The draws of a call; threads may take any rows, each for itself.
class Draws {
 public:
  explicit Draws(const DrawCall& call) : call_(call), how_(call.rows) {
    const Sampling* session = call.sessions;
    const int64_t* count = call.counts;
    for (int64_t row = 0; row < call.rows; ++session, ++count) {
      for (const int64_t end = row + *count; row < end; ++row) how_[row] = session;
    }
  }

  int64_t rows() const { return call_.rows; }
  const DrawCall& call() const { return call_; }
  const Sampling& how(int64_t row) const { return *how_[row]; }

  void draw(int64_t row) const {
    static thread_local Drawer drawer;
    const int64_t vocab = call_.vocab;
    const uint32_t* allowed =
        call_.masks && call_.masks[row] >= 0 ? call_.words + call_.masks[row] * ((vocab + 31) / 32) : nullptr;
    const LogitRow numbers{call_.logits + row * vocab, reinterpret_cast<const uint16_t*>(allowed), vocab, call_.ids};
    const int64_t token = call_.tokens[row] = drawer.draw(numbers, *how_[row], call_.positions[row]);
    if (call_.seconds) draw_second(drawer, numbers, row, token);
  }

 private:
  static constexpr double kKnown = 1e-2;  // part of a sum that is known well enough where the rest of it is taken away

  void draw_second(Drawer& drawer, const LogitRow& numbers, int64_t row, int64_t token) const {
    const Sampling& how = *how_[row];
    float* odds = call_.odds + 2 * row;
    odds[0] = odds[1] = 0.0f;
    call_.seconds[row] = -1;
    if (token < 0) return;
    const double heat = how.temperature == 0.0 ? 1.0 : how.temperature;
    const Weights weights(numbers, heat);
    odds[0] = float(std::min(1.0, weights.of(token) / weights.total));
    const double others = weights.total - weights.of(token);
    const_cast<float*>(numbers.logits)[numbers.place_of(token)] = kNone;
    const int64_t second = call_.seconds[row] = drawer.draw(numbers, how, call_.positions[row]);
    if (second < 0) return;
    if (others > kKnown * weights.total) {
      odds[1] = float(std::min(1.0, weights.of(second) / others));
    } else {  // the difference is what was rounded
      const Weights rest(numbers, heat);
      odds[1] = float(std::min(1.0, rest.of(second) / rest.total));
    }
  }

  const DrawCall call_;
  std::vector<const Sampling*> how_;  // [rows]
};

}  // namespace outrider
