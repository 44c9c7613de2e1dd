// Sampling of tokens: the rules of outrider/speculation/sampling.py, row by row. A row's token depends on that row alone.
//
//   scan        one pass over the logits: the largest one, and the maxima of groups of 16
//   filters     top-k, top-p and min-p: candidates in descending order, and how many of them pass
//   Gumbel max  argmax(logit / temperature + noise): a float32 bound rules out almost every token
//
// A token's noise exceeds a lead of d with probability 1 - exp(-exp(-d)) < exp(-d). So a token whose uniform number is not
// within exp(-d) of 1 has lost, which takes no logarithm to see; the remaining ones are compared in float64.
#pragma once

#include <algorithm>
#include <vector>

#include "noise.h"
#include "logit_scan.h"

namespace outrider {

// Sampling parameters of a session. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.
struct Sampling {
  double temperature, top_p, min_p;
  int64_t top_k;
  uint64_t seed;
};

// The running argmax of logit / temperature + noise; of equal tokens the lowest id wins. A token may enter more than once.
class GumbelMax {
 public:
  GumbelMax(NoiseKey key, double temperature, const LogitScan& scan)
      : key_(key), temperature_(temperature), best_(scan.best), token_(scan.token), score_(weigh(best_, token_)) {
    set_lead();
  }

  int64_t token() const { return token_; }
  // A logit below this cannot win.
  float least() const { return below(best_ + (lead_ - kMaxNoise) * temperature_); }

  void enter(Floats logits, Ints tokens) {
    if (const Mask won = reaches(logits, tokens)) weigh_all(logits, tokens, won);
  }

  // Lanes that may win, by a float32 bound; larger logits never clear a lane.
  Mask reaches(Floats logits, Ints tokens) const {
    const Floats ahead = mul(sub(logits, floats(best_)), floats(inverse_));
    const Floats needed = sub(ahead, floats(lead_));
    const Mask near = greater_equal(needed, floats(-kMaxNoise));
    if (!near) return 0;
    const Ints bits = noise_bits(key_, tokens);
    const Floats rest = to_floats_unsigned(bit_xor(bits, ints(-1)));
    // 1 - u = (rest + 0.5) / 2^32 must lie within exp(needed).
    const Floats chance = mul(exp(needed), floats(0x1p32f));
    return Mask(near & less_equal(rest, chance));
  }

 private:
  // Larger than the float32 errors above, for logits within kMaxNoise of the lead.
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
  const float best_;  // the largest logit
  int64_t token_;
  double score_;  // of the current winner; the largest logit without noise has 0
  float lead_;  // score_ - kMargin in float32
};

// Samples the tokens of one row after another and reuses its memory.
class RowSampler {
 public:
  // Returns -1 if logits are not finite.
  int64_t sample(const LogitRow& row, Sampling params, int64_t position) {
    scan_.take(row);
    if (scan_.token < 0 || params.temperature == 0.0) return scan_.token;
    if (params.top_k >= row.vocab) params.top_k = 0;
    GumbelMax argmax(noise_key(params.seed, uint64_t(position)), params.temperature, scan_);
    if (params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0) {
      enter_all(row, argmax);
    } else {
      const int64_t kept = params.top_k || params.top_p < 1.0 ? keep_first(row, params) : keep_likely(row, params);
      for (int64_t i = 0; i < kept; i += kLanes) {
        const Mask mask = lanes(kept - i);
        const Floats logits = load(logits_.data() + i, mask, floats(kNone));
        argmax.enter(logits, load_ints(tokens_.data() + i, mask));
      }
    }
    return argmax.token();
  }

 private:
  void enter_all(const LogitRow& row, GumbelMax& argmax) const {
    for (int64_t block = 0; block < scan_.blocks; ++block) {
      if (!scan_.reaches(block, floats(argmax.least()))) continue;
      for (int64_t i = block * LogitScan::kBlock; i < (block + 1) * LogitScan::kBlock; i += kLanes) {
        argmax.enter(row.at(i), row.ids_at(i));
      }
    }
  }

  // --- candidates: tokens_ and logits_, of which `count_` ---

  // Collect tokens whose logit is at least `least`, in order of their ids; -inf is never collected.
  void collect(const LogitRow& row, float least) {
    const Floats limit = floats(std::max(least, std::numeric_limits<float>::lowest()));
    if (int64_t(tokens_.size()) < row.vocab + kLanes) {
      tokens_.resize(row.vocab + kLanes);
      logits_.resize(row.vocab + kLanes);
    }
    count_ = 0;
    for (int64_t block = 0; block < scan_.blocks; ++block) {
      if (!scan_.reaches(block, limit)) continue;
      for (int64_t i = block * LogitScan::kBlock; i < (block + 1) * LogitScan::kBlock; i += kLanes) {
        const Floats x = row.at(i);
        const Mask mask = greater_equal(x, limit);
        if (!mask) continue;
        store_kept(logits_.data() + count_, x, mask);
        store_kept(tokens_.data() + count_, row.ids_at(i), mask);
        count_ += __builtin_popcount(mask);
      }
    }
  }

  // Sort candidates in descending order, equal ones by ascending id.
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

  // Radix sort by the logits' bits; it is stable, and ids ascend already.
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
    return std::exp((double(logit) - double(scan_.best)) / temperature);
  }
  // A logit with at most this weight, rounded down.
  float logit_of(double weight, double temperature) const {
    return weight > 0.0 ? below(scan_.best + temperature * std::log(weight)) : kNone;
  }

  // min_p alone: candidates need no order.
  int64_t keep_likely(const LogitRow& row, const Sampling& params) {
    collect(row, std::max(logit_of(params.min_p * (1.0 - kSlack), params.temperature), reach(params)));
    int64_t kept = 0;
    for (int64_t i = 0; i < count_; ++i) {
      if (weight(logits_[i], params.temperature) < params.min_p) continue;
      logits_[kept] = logits_[i];
      tokens_[kept++] = tokens_[i];
    }
    return kept;
  }

  // top_k and top_p, with or without min_p: the first ones in descending order.
  int64_t keep_first(const LogitRow& row, const Sampling& params) {
    Mass mass{};
    const bool nucleus = params.top_p < 1.0;
    if (params.top_k) {
      collect(row, std::max(scan_.least_of(params.top_k), nucleus ? kNone : reach(params)));
    } else {
      mass = mass_of(row, params);
      collect_nucleus(row, params, mass);
    }
    sort();
    const int64_t first = params.top_k ? std::min(params.top_k, count_) : count_;
    if (nucleus && params.top_k) {
      double total = 0.0;
      for (int64_t i = 0; i < first; ++i) total += weight(logits_[i], params.temperature);
      mass = {total, total};
    }
    int64_t kept = nucleus ? count_within(params, first, mass.low) : first;
    if (mass.low < mass.high && count_within(params, first, mass.high) != kept) {
      kept = count_within(params, first, exact_mass(row, params));
    }
    while (params.min_p > 0.0 && kept > 1 && weight(logits_[kept - 1], params.temperature) < params.min_p) --kept;
    return kept;
  }

  // How many of the first candidates have less than top_p of the mass in front of them.
  int64_t count_within(const Sampling& params, int64_t first, double mass) const {
    double sum = 0.0;
    for (int64_t i = 0; i < first; ++i) {
      const double own = weight(logits_[i], params.temperature);
      sum += own;
      if (!(sum - own < params.top_p * mass)) return i;
    }
    return first;
  }

  // Bounds of a sum of weights.
  struct Mass {
    double low, high;
  };

  // The mass of all tokens, summed in float32.
  Mass mass_of(const LogitRow& row, const Sampling& params) const {
    double sum = 0.0;
    for (int64_t block = 0; block < scan_.blocks; ++block) {
      const int64_t first = block * LogitScan::kBlock;
      sum += rough_weights(params, LogitScan::kBlock, [&](int64_t i) { return row.at(first + i); });
    }
    return {sum * (1.0 - kSlack), sum * (1.0 + kSlack)};
  }

  double exact_mass(const LogitRow& row, const Sampling& params) const {
    double sum = 0.0;
    alignas(64) float logits[kLanes];
    for (int64_t i = 0; i < row.vocab; i += kLanes) {
      store(logits, row.at(i));
      for (const float logit : logits) sum += logit == kNone ? 0.0 : weight(logit, params.temperature);
    }
    return sum;
  }

  template <class Logits>
  double rough_weights(const Sampling& params, int64_t count, Logits&& logits) const {
    const Floats best = floats(scan_.best), inverse = floats(float(1.0 / params.temperature));
    Floats sum = floats();
    for (int64_t i = 0; i < count; i += kLanes) {
      sum = add(sum, exp(mul(sub(logits(i), best), inverse)));
    }
    return double(sum_of(sum));
  }

  // Collect every token of the nucleus that the noise can lift to first place, with few others, by lowering a bound.
  void collect_nucleus(const LogitRow& row, const Sampling& params, const Mass& mass) {
    const float lowest = reach(params);
    // 64 tokens less likely than this have less mass together than top_p leaves out.
    double least = (1.0 - params.top_p) * mass.low / 64.0;
    for (;; least /= 32.0) {
      const float floor = std::max(logit_of(std::min(least, 1.0), params.temperature), lowest);
      collect(row, floor);
      if (floor == lowest || collected(params) > params.top_p * mass.high) return;
    }
  }

  // The candidates' mass, rounded down.
  double collected(const Sampling& params) const {
    double sum = 0.0;
    for (int64_t first = 0; first < count_; first += LogitScan::kBlock) {
      sum += rough_weights(params, std::min(LogitScan::kBlock, count_ - first), [&](int64_t i) {
        const Mask mask = lanes(count_ - first - i);
        return load(logits_.data() + first + i, mask, floats(kNone));
      });
    }
    return sum * (1.0 - kSlack);
  }

  // A logit below this loses to the largest one whatever the noise.
  float reach(const Sampling& params) const { return below(scan_.best - params.temperature * kNoiseRange); }

  // Relative margin of float32 sums, far above their rounding error.
  static constexpr double kSlack = 2e-5;
  // Up to this many candidates use a comparison sort.
  static constexpr int64_t kFew = 1500;

  LogitScan scan_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_;
  std::vector<uint64_t> keys_, sorted_;
  int64_t count_ = 0;
};

// Probability of a token in a row's softmax without filters; 0 if it could not be sampled.
inline float probability_of(const LogitRow& row, double temperature, int64_t token) {
  if (token < 0) return 0.0f;
  Floats top = floats(kNone), sum = floats();
  for (int64_t i = 0; i < row.vocab; i += kLanes) top = max(top, row.at(i));
  const float best = largest_of(top);
  const double divisor = temperature == 0.0 ? 1.0 : temperature;
  const Floats inverse = floats(float(1.0 / divisor));
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    const Floats x = row.at(i);
    if (!greater(x, floats(kNone))) continue;
    sum = add(sum, exp(mul(sub(x, floats(best)), inverse)));
  }
  const double own = std::exp((double(row.logits[row.place_of(token)]) - double(best)) / divisor);
  return float(std::min(1.0, own / double(sum_of(sum))));
}

// The rows to sample a token after.
struct SampleCall {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const Sampling* sessions;  // parameters of each session
  const int64_t* counts;  // rows of each session
  const int64_t* positions;  // [rows], of the sampled tokens
  const int64_t* masks;  // [rows], the row's line in `words`, or -1 for no grammar; null if no row has one
  const uint32_t* words;  // [lines, ceil(vocab / 32)]
  int64_t* tokens;  // [rows]
  const int32_t* ids;  // [vocab], as in LogitRow
  float* probabilities;  // [rows], of the tokens without filters; null for none
};

// The samples of a call; threads may take any rows.
class SampleBatch {
 public:
  explicit SampleBatch(const SampleCall& call) : call_(call), params_(call.rows) {
    const Sampling* session = call.sessions;
    const int64_t* count = call.counts;
    for (int64_t row = 0; row < call.rows; ++session, ++count) {
      for (const int64_t end = row + *count; row < end; ++row) params_[row] = session;
    }
  }

  int64_t rows() const { return call_.rows; }
  const SampleCall& call() const { return call_; }
  const Sampling& params(int64_t row) const { return *params_[row]; }

  void sample(int64_t row) const {
    static thread_local RowSampler sampler;
    const int64_t vocab = call_.vocab;
    const uint32_t* allowed =
        call_.masks && call_.masks[row] >= 0 ? call_.words + call_.masks[row] * ((vocab + 31) / 32) : nullptr;
    const LogitRow numbers{call_.logits + row * vocab, reinterpret_cast<const uint16_t*>(allowed), vocab, call_.ids};
    const int64_t token = call_.tokens[row] = sampler.sample(numbers, *params_[row], call_.positions[row]);
    if (call_.probabilities) call_.probabilities[row] = probability_of(numbers, params_[row]->temperature, token);
  }

 private:
  const SampleCall call_;
  std::vector<const Sampling*> params_;  // [rows]
};

}  // namespace outrider
