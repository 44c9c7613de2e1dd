// The most likely next tokens of a row, by the rules of services/draft/model/sampling.py.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "noise.h"
#include "threads.h"

namespace outrider {

constexpr float kNever = -1e30f;  // a logit of padding
constexpr float kNothing = -std::numeric_limits<float>::infinity();  // a score of what a filter removes
constexpr float kGreedyBelow = 1e-5f;      // of temperatures; outrider/speculation/sampling.py
constexpr float kDeepest = -100.0f;        // natural log of a probability that no filter needs to tell from 0
constexpr int kBisections = 32;

struct CandidatesCall {
  const float* logits;  // [S, R, vocab]
  const int32_t* ids;   // [vocab], the target's; null where they are the entries' own
  int64_t sessions, rows, vocab, count;
  int32_t limit;  // ids from here on are padding
  const float *temperature, *top_p, *min_p;  // [S]
  const int32_t* top_k;                      // [S]
  const uint32_t* keys;                      // [S, R, 2]
  int32_t* tokens;                           // [S, R, count]
  float* log_scores;                         // [S, R, count]
};

inline __m512i iota(int64_t first) {
  return _mm512_add_epi32(_mm512_set1_epi32(int(first)),
                          _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

// log(1 + f) for f in [-0.293, 0.415]; exact near 0.
inline __m512 log1p_small(__m512 f) {
  __m512 p = _mm512_set1_ps(7.0376836292e-2f);
  for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                        2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f}) {
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  }
  const __m512 square = _mm512_mul_ps(f, f);
  return _mm512_add_ps(f, _mm512_fmadd_ps(_mm512_mul_ps(square, f), p, _mm512_mul_ps(square, _mm512_set1_ps(-0.5f))));
}

// log(x) for normal x > 0.
inline __m512 log512(__m512 x) {
  const __m512 half = _mm512_set1_ps(0.70710678f);
  __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_src);  // [0.5, 1)
  __m512 exponent = _mm512_add_ps(_mm512_getexp_ps(x), _mm512_set1_ps(1.0f));
  const __mmask16 low = _mm512_cmp_ps_mask(mantissa, half, _CMP_LT_OQ);
  mantissa = _mm512_mask_add_ps(mantissa, low, mantissa, mantissa);
  exponent = _mm512_mask_sub_ps(exponent, low, exponent, _mm512_set1_ps(1.0f));
  return _mm512_fmadd_ps(exponent, _mm512_set1_ps(0.69314718056f),
                         log1p_small(_mm512_sub_ps(mantissa, _mm512_set1_ps(1.0f))));
}

// Gumbel noise of bits in float32: u = (bits + 0.5) / 2^32; close to 1, where the winners are, from its distance to 1.
inline __m512 gumbel512(__m512i bits) {
  const __m512 scale = _mm512_set1_ps(0x1p-32f), half = _mm512_set1_ps(0.5f);
  const __m512 u = _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepu32_ps(bits), half), scale);
  const __m512i inverted = _mm512_xor_si512(bits, _mm512_set1_epi32(-1));
  const __m512 rest = _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepu32_ps(inverted), half), scale);
  const __mmask16 near = _mm512_cmp_ps_mask(rest, _mm512_set1_ps(0.29f), _CMP_LT_OQ);
  const __m512 zero = _mm512_setzero_ps();
  const __m512 log_u = _mm512_mask_mov_ps(log512(u), near, log1p_small(_mm512_sub_ps(zero, rest)));
  return _mm512_sub_ps(zero, log512(_mm512_sub_ps(zero, log_u)));
}

// The candidates of one row after another, in memory of its own.
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
  __m512i ids(int64_t i, __mmask16 mask) const {
    return call_.ids ? _mm512_maskz_loadu_epi32(mask, call_.ids + i) : iota(i);
  }
  __m512 score(int64_t i, __mmask16 mask) const {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(kNever), mask, scores_ + i);
  }

  // Logits of real tokens times a factor become scores. Returns the largest.
  float scale(float factor) {
    __m512 largest = _mm512_set1_ps(kNever);
    const __m512 times = _mm512_set1_ps(factor);
    const __m512i limit = _mm512_set1_epi32(call_.limit);
    each([&](int64_t i, __mmask16 mask) {
      const __mmask16 real = _mm512_mask_cmplt_epi32_mask(mask, ids(i, mask), limit);
      const __m512 x = _mm512_mask_mul_ps(_mm512_set1_ps(kNever), real, load(from_ + i, mask), times);
      store(scores_ + i, x, mask);
      largest = _mm512_max_ps(largest, x);
    });
    return _mm512_reduce_max_ps(largest);
  }

  // Sum of e^(score - largest).
  float mass(float largest) const {
    __m512 sum = _mm512_setzero_ps();
    const __m512 top = _mm512_set1_ps(largest);
    each([&](int64_t i, __mmask16 mask) { sum = _mm512_add_ps(sum, exp512(_mm512_sub_ps(score(i, mask), top))); });
    return _mm512_reduce_add_ps(sum);
  }

  void shift(float by) {
    each([&](int64_t i, __mmask16 mask) {
      store(scores_ + i, _mm512_sub_ps(score(i, mask), _mm512_set1_ps(by)), mask);
    });
  }

  // --- filters on log-probabilities ---

  void filter(int64_t session) {
    const int32_t top_k = call_.top_k[session];
    const float top_p = call_.top_p[session], min_p = call_.min_p[session];
    if (top_k > 0) keep_before(float(top_k), [](__m512) { return _mm512_set1_ps(1.0f); });
    if (top_p < 1.0f) keep_before(top_p * mass(0.0f), [](__m512 x) { return exp512(x); });
    if (min_p > 0.0f) {
      __m512 top = _mm512_set1_ps(kNever);
      each([&](int64_t i, __mmask16 mask) { top = _mm512_max_ps(top, score(i, mask)); });
      keep(_mm512_reduce_max_ps(top) + std::log(std::max(min_p, 1e-30f)), true);
    }
  }

  // Keep the tokens whose likelier ones weigh less than the limit, found by bisection.
  template <class Weigh>
  void keep_before(float limit, Weigh&& weigh) {
    float low = kDeepest, high = 0.0f;
    for (int turn = 0; turn < kBisections; ++turn) {
      const float middle = 0.5f * (low + high);
      __m512 above = _mm512_setzero_ps();
      each([&](int64_t i, __mmask16 mask) {
        const __m512 x = score(i, mask);
        const __mmask16 more = _mm512_cmp_ps_mask(x, _mm512_set1_ps(middle), _CMP_GT_OQ);
        if (more) above = _mm512_mask_add_ps(above, more, above, weigh(x));
      });
      (_mm512_reduce_add_ps(above) < limit ? high : low) = middle;
    }
    if (low > kDeepest) keep(low, false);
  }

  void keep(float least, bool equal) {
    const __m512 bound = _mm512_set1_ps(least);
    each([&](int64_t i, __mmask16 mask) {
      const __m512 x = score(i, mask);
      const __mmask16 kept = equal ? _mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ) : _mm512_cmp_ps_mask(x, bound, _CMP_GT_OQ);
      store(scores_ + i, _mm512_mask_mov_ps(_mm512_set1_ps(kNothing), kept, x), mask);
    });
  }

  // Returns the largest noisy score.
  float add_noise(NoiseKey key) {
    __m512 largest = _mm512_set1_ps(kNever);
    each([&](int64_t i, __mmask16 mask) {
      const __m512 x = _mm512_add_ps(score(i, mask), gumbel512(noise_bits512(key, ids(i, mask))));
      store(scores_ + i, x, mask);
      largest = _mm512_mask_max_ps(largest, mask, largest, x);
    });
    return _mm512_reduce_max_ps(largest);
  }

  // --- the best ones; of equals the first entry ---

  void best(int32_t* tokens, float* log_scores, float largest) {
    const int64_t count = call_.count;
    std::fill_n(tokens, count, 0);
    std::fill_n(log_scores, count, kNothing);
    each([&](int64_t i, __mmask16 mask) {
      const __m512 least = _mm512_set1_ps(log_scores[count - 1]);
      for (unsigned rest = _mm512_mask_cmp_ps_mask(mask, score(i, mask), least, _CMP_GT_OQ); rest; rest &= rest - 1) {
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

inline void candidates(Crew& crew, const CandidatesCall& call) {
  share(crew, call.sessions * call.rows,
        [&](int64_t row) { Candidates(call).take(row / call.rows, row % call.rows); });
}

}  // namespace outrider
