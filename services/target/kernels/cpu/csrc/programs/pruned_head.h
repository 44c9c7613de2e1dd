// Exact sampling from approximate logits. A narrow copy of the LM head, half of its bytes or less, gives all logits within a
// bound. Only the few panels that could win are multiplied with the head itself, so the sampled token has the same bits as
// with all exact logits.
//
// With x and w as the head multiplies them, and x' and w' in the narrow format:
//
//   |x w - x' w'|  <=  |x| |w - w'| + |x - x'| |w'|      (Cauchy-Schwarz, twice)
//
// |w - w'| and |w'| are stored for each output. The first includes the rounding error of float32 products.
//
//   rough   each row: mark the panels that could hold its largest logit
//   exact   multiply these panels with the head itself, for all rows
//   settle  each row: its largest logit; with noise, mark the other panels that could win
//   exact   multiply these panels
//   race    each row with noise: its token
#pragma once

#include <atomic>
#include <cmath>
#include <memory>

#include "sampling/sampling.h"
#include "products/linear.h"

namespace outrider {

struct PrunedHead {
  const Weight* weight = nullptr;  // the narrow copy
  const float* error_norms = nullptr;   // [panels * 32], |w - w'|
  const float* narrow_norms = nullptr;    // [panels * 32], |w'|
};

// Error bounds of a row's logits.
struct LogitBounds {
  const PrunedHead* pruned_head;
  float length, distance;  // |x|, |x - x'|

  // LogitBounds of 16 outputs.
  Floats from(int64_t output) const {
    const Floats error = mul(floats(length), load(pruned_head->error_norms + output));
    return fmadd(floats(distance), load(pruned_head->narrow_norms + output), error);
  }
  bool finite() const { return std::isfinite(length) && std::isfinite(distance); }
};

// |x| and |x - x'| of one row. T: number format of the wide operand; the narrow operand has 8 bits.
template <class T>
LogitBounds bounds_of(const PrunedHead& pruned_head, const Operand& wide, const Operand& narrow) {
  Floats length = floats(), distance = floats();
  for (int64_t chunk = 0; chunk < pruned_head.weight->k / kGroup; ++chunk) {
    const Floats scale = floats(narrow.scales[chunk]);
    for (int64_t i = chunk * kGroup; i < (chunk + 1) * kGroup && i < pruned_head.weight->inputs; i += kLanes) {
      const Mask mask = lanes(pruned_head.weight->inputs - i);
      const Floats rough = mul(scale, to_floats(load_int8(narrow, *pruned_head.weight, i, mask)));
      const Floats exact = load(reinterpret_cast<const T*>(wide.data) + i, mask);
      const Floats off = sub(exact, rough);
      length = fmadd(exact, exact, length);
      distance = fmadd(off, off, distance);
    }
  }
  constexpr float kMore = 1.0001f;  // exceeds the rounding error of the sums
  return {&pruned_head, kMore * std::sqrt(sum_of(length)), kMore * std::sqrt(sum_of(distance))};
}

// The state of each panel's logits: rough, wanted or exact. Any thread may mark panels as wanted.
class PanelStates {
 public:
  void reset(int64_t count) {
    if (count > room_) states_.reset(new std::atomic<uint8_t>[count]), room_ = count;
    for (int64_t panel = 0; panel < count; ++panel) states_[panel].store(kRough, std::memory_order_relaxed);
    count_ = count;
  }
  int64_t count() const { return count_; }
  bool exact(int64_t panel) const { return state(panel) == kExact; }
  bool wanted(int64_t panel) const { return state(panel) == kWanted; }
  void want(int64_t panel) {
    if (state(panel) == kRough) states_[panel].store(kWanted, std::memory_order_relaxed);
  }
  void settle(int64_t panel) { states_[panel].store(kExact, std::memory_order_relaxed); }
  double share() const {
    int64_t exact_ones = 0;
    for (int64_t panel = 0; panel < count_; ++panel) exact_ones += exact(panel);
    return count_ ? double(exact_ones) / double(count_) : 0.0;
  }

 private:
  static constexpr uint8_t kRough = 0, kWanted = 1, kExact = 2;
  uint8_t state(int64_t panel) const { return states_[panel].load(std::memory_order_relaxed); }

  std::unique_ptr<std::atomic<uint8_t>[]> states_;
  int64_t count_ = 0, room_ = 0;
};

// Sampling of one row. logits: [vocab], rough except in exact panels.
class PrunedRow {
 public:
  // True for greedy sampling and for sampling without filters.
  static bool serves(const Sampling& params) {
    return params.temperature == 0.0 || (params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0);
  }

  void rough(const float* logits, int64_t vocab, const LogitBounds& bounds, PanelStates& panels) {
    logits_ = logits, vocab_ = vocab, bounds_ = bounds;
    best_ = LogitScan();
    if (!bounds.finite()) return;
    tops_.resize(panels.count());
    Floats lowest = floats(kNone);  // lower bound of the largest logit
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      Floats high = floats(kNone);
      Mask any_nan = 0;
      for (int64_t token = panel * kPanel; token < (panel + 1) * kPanel; token += kLanes) {
        const Floats logits = at(token), bound = bounds.from(token), top = add(logits, bound);
        any_nan = Mask(any_nan | unordered(top, top));
        high = max(high, top);
        lowest = max(sub(logits, bound), lowest);  // max returns its second argument if one is NaN
      }
      tops_[panel] = any_nan ? std::numeric_limits<float>::infinity() : largest_of(high);
    }
    const float least = largest_of(lowest);
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      if (tops_[panel] >= least) panels.want(panel);
    }
  }

  // Returns the largest logit's token, -1 if logits are not finite. With noise, marks panels that could win as wanted.
  int64_t settle(const Sampling& params, int64_t position, PanelStates& panels) {
    if (!bounds_.finite() || !find_best(panels)) return best_.token = -1;
    if (params.temperature == 0.0) return best_.token;
    const GumbelMax argmax = entered(params, position, panels);
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      if (!panels.exact(panel) && tops_[panel] >= argmax.least() && may_win(argmax, panel)) panels.want(panel);
    }
    return best_.token;
  }

  // The token with noise.
  int64_t sample_noisy(const Sampling& params, int64_t position, const PanelStates& panels) const {
    return best_.token < 0 ? -1 : entered(params, position, panels).token();
  }

 private:
  // The tokens of all exact panels compete.
  GumbelMax entered(const Sampling& params, int64_t position, const PanelStates& panels) const {
    GumbelMax argmax(noise_key(params.seed, uint64_t(position)), params.temperature, best_);
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      if (!panels.exact(panel)) continue;
      for (int64_t token = panel * kPanel; token < (panel + 1) * kPanel; token += kLanes) {
        argmax.enter(at(token), ids_from(token));
      }
    }
    return argmax;
  }

  bool find_best(const PanelStates& panels) {
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      if (!panels.exact(panel)) continue;
      for (int64_t token = panel * kPanel; token < std::min(vocab_, (panel + 1) * kPanel); ++token) {
        const float logit = logits_[token];
        if (!std::isfinite(logit) && logit != kNone) return false;
        if (logit > best_.best) best_.best = logit, best_.token = token;
      }
    }
    return best_.token >= 0;
  }

  // True if a token of the panel could win at the upper bound of its logit.
  bool may_win(const GumbelMax& argmax, int64_t panel) const {
    for (int64_t token = panel * kPanel; token < (panel + 1) * kPanel; token += kLanes) {
      if (argmax.reaches(add(at(token), bounds_.from(token)), ids_from(token))) return true;
    }
    return false;
  }

  Floats at(int64_t token) const {
    return load(logits_ + token, lanes(vocab_ - token), floats(kNone));
  }

  const float* logits_ = nullptr;
  int64_t vocab_ = 0;
  LogitBounds bounds_{};
  LogitScan best_;               // only its best logit and token are set
  std::vector<float> tops_;  // upper bound of the logits of each panel
};

// Decides whether to use the narrow copy: while many panels could win, the head itself is read directly for kPauseSteps steps.
class PruningGate {
 public:
  bool enabled() {
    if (pause_ > 0) return --pause_ == 0;
    return true;
  }
  // share: of panels that became exact in the step.
  void observe(double share) {
    mean_share_ += kEmaWeight * (share - mean_share_);
    if (mean_share_ <= kMaxShare) return;
    mean_share_ = kMaxShare - kEmaWeight * kMaxShare;
    pause_ = kPauseSteps;
  }

 private:
  static constexpr double kMaxShare = 0.3, kEmaWeight = 0.1;
  static constexpr int kPauseSteps = 128;  // steps
  double mean_share_ = 0.0;
  int pause_ = 0;
};

}  // namespace outrider
