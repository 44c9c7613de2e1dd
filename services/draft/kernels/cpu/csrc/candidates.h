// The most likely next tokens of a row, by the rules of services/draft/model/programs/sampling.py.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "noise.h"
#include "threads.h"

namespace outrider {

constexpr float kNever = -1e30f;  // a logit of padding
constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the score of a filtered token
constexpr float kGreedyBelow = 1e-6f;      // of temperatures; outrider/speculation/sampling.py
constexpr float kDeepest = -100.0f;        // natural log of a probability that filters treat as 0
constexpr int kBisections = 32;

struct CandidatesCall {
  const float* logits;  // [S, R, vocab]
  const int32_t* ids;   // [vocab], the target's; null where they equal the entries
  int64_t sessions, rows, vocab, count;
  int32_t limit;  // ids from there on are padding
  const float *temperature, *top_p, *min_p;  // [S]
  const int32_t* top_k;                      // [S]
  const uint32_t* keys;                      // [S, R, 2]
  int32_t* tokens;                           // [S, R, count]
  float* log_scores;                         // [S, R, count]
};

// log(1 + f) for f in [-0.293, 0.415]; exact near 0.
inline Floats log1p_small(Floats f) {
  Floats p = floats(7.0376836292e-2f);
  for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                        2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f}) {
    p = fmadd(p, f, floats(c));
  }
  const Floats square = mul(f, f);
  return add(f, fmadd(mul(square, f), p, mul(square, floats(-0.5f))));
}

// log(x) for normal x > 0.
inline Floats log(Floats x) {
  const Floats half = floats(0.70710678f);
  Floats mantissa = mantissa_of(x);  // [0.5, 1)
  Floats exponent = exponent_of(x);
  const Mask low = less(mantissa, half);
  mantissa = select(low, add(mantissa, mantissa), mantissa);
  exponent = select(low, sub(exponent, floats(1.0f)), exponent);
  return fmadd(exponent, floats(0.69314718056f), log1p_small(sub(mantissa, floats(1.0f))));
}

// Gumbel noise of bits in float32: u = (bits + 0.5) / 2^32; close to 1, where the noise is largest, from 1 - u.
inline Floats gumbel(Ints bits) {
  const Floats scale = floats(0x1p-32f), half = floats(0.5f);
  const Floats u = mul(add(to_floats_unsigned(bits), half), scale);
  const Ints inverted = bit_xor(bits, ints(-1));
  const Floats rest = mul(add(to_floats_unsigned(inverted), half), scale);
  const Mask near = less(rest, floats(0.29f));
  const Floats zero = floats();
  const Floats log_u = select(near, log1p_small(sub(zero, rest)), log(u));
  return sub(zero, log(sub(zero, log_u)));
}

// Computes the candidates of a row, in memory of the calling thread.
class Candidates {
 public:
  explicit Candidates(const CandidatesCall& call) : call_(call) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < call.vocab + kLanes) memory.resize(call.vocab + kLanes);
    scores_ = memory.data();
  }

  void take(int64_t session, int64_t row) {
    const int64_t index = session * call_.rows + row;
    from_ = call_.logits + index * call_.vocab;
    const float temperature = call_.temperature[session];
    const bool sampled = temperature >= kGreedyBelow;
    float largest = scale(sampled ? 1.0f / temperature : 1.0f);
    if (sampled) {
      shift(largest + std::log(mass(largest)));
      filter(session);
      largest = add_noise({call_.keys[2 * index], call_.keys[2 * index + 1]});
    }
    best(call_.tokens + index * call_.count, call_.log_scores + index * call_.count, largest);
  }

 private:
  template <class Visit>
  void each(Visit&& visit) const {
    for (int64_t i = 0; i < call_.vocab; i += kLanes) visit(i, lanes(call_.vocab - i));
  }
  Ints ids(int64_t i, Mask mask) const {
    return call_.ids ? load_ints(call_.ids + i, mask) : ids_from(i);
  }
  Floats score(int64_t i, Mask mask) const {
    return load(scores_ + i, mask, floats(kNever));
  }

  // Logits of real tokens times a factor become scores. Returns the largest.
  float scale(float factor) {
    Floats largest = floats(kNever);
    const Floats times = floats(factor);
    const Ints limit = ints(call_.limit);
    each([&](int64_t i, Mask mask) {
      const Mask real = Mask(mask & less(ids(i, mask), limit));
      const Floats x = select(real, mul(load(from_ + i, mask), times), floats(kNever));
      store(scores_ + i, x, mask);
      largest = max(largest, x);
    });
    return largest_of(largest);
  }

  // Sum of e^(score - largest).
  float mass(float largest) const {
    Floats sum = floats();
    const Floats top = floats(largest);
    each([&](int64_t i, Mask mask) { sum = add(sum, exp(sub(score(i, mask), top))); });
    return sum_of(sum);
  }

  void shift(float by) {
    each([&](int64_t i, Mask mask) {
      store(scores_ + i, sub(score(i, mask), floats(by)), mask);
    });
  }

  // --- filters on log-probabilities ---

  void filter(int64_t session) {
    const int32_t top_k = call_.top_k[session];
    const float top_p = call_.top_p[session], min_p = call_.min_p[session];
    if (top_k > 0) keep_before(float(top_k), [](Floats) { return floats(1.0f); });
    if (top_p < 1.0f) keep_before(top_p * mass(0.0f), [](Floats x) { return exp(x); });
    if (min_p > 0.0f) {
      Floats top = floats(kNever);
      each([&](int64_t i, Mask mask) { top = max(top, score(i, mask)); });
      keep(largest_of(top) + std::log(std::max(min_p, 1e-30f)), true);
    }
  }

  // Keep tokens while more likely ones weigh less than the limit; the threshold is found by bisection.
  template <class Weigh>
  void keep_before(float limit, Weigh&& weigh) {
    float low = kDeepest, high = 0.0f;
    for (int turn = 0; turn < kBisections; ++turn) {
      const float middle = 0.5f * (low + high);
      Floats above = floats();
      each([&](int64_t i, Mask mask) {
        const Floats x = score(i, mask);
        const Mask more = greater(x, floats(middle));
        if (more) above = select(more, add(above, weigh(x)), above);
      });
      (sum_of(above) < limit ? high : low) = middle;
    }
    if (low > kDeepest) keep(low, false);
  }

  void keep(float least, bool equal) {
    const Floats bound = floats(least);
    each([&](int64_t i, Mask mask) {
      const Floats x = score(i, mask);
      const Mask kept = equal ? greater_equal(x, bound) : greater(x, bound);
      store(scores_ + i, select(kept, x, floats(kNothing)), mask);
    });
  }

  // Returns the largest noisy score.
  float add_noise(NoiseKey key) {
    Floats largest = floats(kNever);
    each([&](int64_t i, Mask mask) {
      const Floats x = add(score(i, mask), gumbel(noise_bits(key, ids(i, mask))));
      store(scores_ + i, x, mask);
      largest = select(mask, max(largest, x), largest);
    });
    return largest_of(largest);
  }

  // --- the best candidates; ties go to the lower entry ---

  void best(int32_t* tokens, float* log_scores, float largest) {
    const int64_t count = call_.count;
    std::fill_n(tokens, count, 0);
    std::fill_n(log_scores, count, kNothing);
    each([&](int64_t i, Mask mask) {
      const Floats least = floats(log_scores[count - 1]);
      for (unsigned rest = Mask(mask & greater(score(i, mask), least)); rest; rest &= rest - 1) {
        insert(tokens, log_scores, i + __builtin_ctz(rest));
      }
    });
    const float total = largest + std::log(mass(largest));
    for (int64_t i = 0; i < count; ++i) {
      log_scores[i] = std::min(log_scores[i] - total, 0.0f);
      if (call_.ids) tokens[i] = call_.ids[tokens[i]];
    }
  }

  void insert(int32_t* tokens, float* log_scores, int64_t entry) const {
    const float score = scores_[entry];
    int64_t place = call_.count;
    for (; place > 0 && score > log_scores[place - 1]; --place) {
      if (place == call_.count) continue;
      tokens[place] = tokens[place - 1];
      log_scores[place] = log_scores[place - 1];
    }
    if (place == call_.count) return;
    tokens[place] = int32_t(entry);
    log_scores[place] = score;
  }

  const CandidatesCall& call_;
  const float* from_ = nullptr;
  float* scores_;
};

inline void candidates(ThreadPool& pool, const CandidatesCall& call) {
  parallel_for(pool, call.sessions * call.rows,
        [&](int64_t row) { Candidates(call).take(row / call.rows, row % call.rows); });
}

}  // namespace outrider
