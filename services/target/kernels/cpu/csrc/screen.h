// Drawing from logits of which most are known within bounds alone: those of a narrow copy of the head, which is half of
// the bytes or less. The few panels that could win are multiplied with the head itself, so the token is the one that all
// logits would have given, to the last bit.
//
// With x and w as the head multiplies them, and x' and w' in the narrow format:
//
//   |x w - x' w'|  <=  |x| |w - w'| + |x - x'| |w'|      (Cauchy and Schwarz, twice)
//
// Of each output |w - w'| and |w'| are kept. What float32 rounds is in the first of them.
//
//   rough   each row: which panels could hold its largest logit
//   exact   these panels, with the head itself, for all rows
//   settle  each row: its largest logit; behind noise, which other panels could win
//   exact   these panels
//   race    each row with noise: its token
#pragma once

#include <atomic>
#include <cmath>
#include <memory>

#include "draw.h"
#include "linear.h"

namespace outrider {

struct Screen {
  const Weight* weight = nullptr;  // the narrow copy
  const float* errors = nullptr;   // [panels * 32], |w - w'|
  const float* sizes = nullptr;    // [panels * 32], |w'|
};

// What a row's logits can be off by.
struct Bounds {
  const Screen* screen;
  float length, distance;  // |x|, |x - x'|

  // Those of 16 outputs.
  Floats from(int64_t output) const {
    const Floats error = mul(floats(length), load(screen->errors + output));
    return fmadd(floats(distance), load(screen->sizes + output), error);
  }
  bool finite() const { return std::isfinite(length) && std::isfinite(distance); }
};

// |x| and |x - x'| of single rows. T: numbers of the wide one, in an operand of that format; narrow is of 8 bits.
template <class T>
Bounds bounds_of(const Screen& screen, const Operand& wide, const Operand& narrow) {
  Floats length = floats(), distance = floats();
  for (int64_t chunk = 0; chunk < screen.weight->k / kGroup; ++chunk) {
    const Floats scale = floats(narrow.scales[chunk]);
    for (int64_t i = chunk * kGroup; i < (chunk + 1) * kGroup && i < screen.weight->inputs; i += kLanes) {
      const Mask mask = lanes(screen.weight->inputs - i);
      const Floats rough = mul(scale, to_floats(load_eight(narrow, *screen.weight, i, mask)));
      const Floats exact = load(reinterpret_cast<const T*>(wide.data) + i, mask);
      const Floats off = sub(exact, rough);
      length = fmadd(exact, exact, length);
      distance = fmadd(off, off, distance);
    }
  }
  constexpr float kMore = 1.0001f;  // than float32 rounds
  return {&screen, kMore * std::sqrt(sum_of(length)), kMore * std::sqrt(sum_of(distance))};
}

// Which panels' logits are exact; any thread may ask for more.
class Panels {
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

// One row's part. logits: [vocab], rough but for exact panels.
class ScreenedRow {
 public:
  // True if all that is asked for is the largest logit, or the largest behind noise.
  static bool serves(const Sampling& how) {
    return how.temperature == 0.0 || (how.top_k == 0 && how.top_p >= 1.0 && how.min_p <= 0.0);
  }

  void rough(const float* logits, int64_t vocab, const Bounds& bounds, Panels& panels) {
    logits_ = logits, vocab_ = vocab, bounds_ = bounds;
    best_ = Survey();
    if (!bounds.finite()) return;
    tops_.resize(panels.count());
    Floats lowest = floats(kNone);  // that the largest logit is, at least
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      Floats high = floats(kNone);
      Mask strange = 0;
      for (int64_t token = panel * kPanel; token < (panel + 1) * kPanel; token += kLanes) {
        const Floats logits = at(token), bound = bounds.from(token), top = add(logits, bound);
        strange = Mask(strange | unordered(top, top));
        high = max(high, top);
        lowest = max(sub(logits, bound), lowest);  // the second, where one is not a number
      }
      tops_[panel] = strange ? std::numeric_limits<float>::infinity() : largest_of(high);
    }
    const float least = largest_of(lowest);
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      if (tops_[panel] >= least) panels.want(panel);
    }
  }

  // The largest logit's token, -1 where logits are not finite; with noise, panels that could win are asked for.
  int64_t settle(const Sampling& how, int64_t position, Panels& panels) {
    if (!bounds_.finite() || !find_best(panels)) return best_.token = -1;
    if (how.temperature == 0.0) return best_.token;
    const Race race = entered(how, position, panels);
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      if (!panels.exact(panel) && tops_[panel] >= race.least() && may_win(race, panel)) panels.want(panel);
    }
    return best_.token;
  }

  // Behind noise.
  int64_t race(const Sampling& how, int64_t position, const Panels& panels) const {
    return best_.token < 0 ? -1 : entered(how, position, panels).token();
  }

 private:
  // Those of all exact panels compete.
  Race entered(const Sampling& how, int64_t position, const Panels& panels) const {
    Race race(noise_key(how.seed, uint64_t(position)), how.temperature, best_);
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      if (!panels.exact(panel)) continue;
      for (int64_t token = panel * kPanel; token < (panel + 1) * kPanel; token += kLanes) {
        race.enter(at(token), ids_from(token));
      }
    }
    return race;
  }

  bool find_best(const Panels& panels) {
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

  // True if a token of the panel could win if its logit were as large as can be.
  bool may_win(const Race& race, int64_t panel) const {
    for (int64_t token = panel * kPanel; token < (panel + 1) * kPanel; token += kLanes) {
      if (race.reaches(add(at(token), bounds_.from(token)), ids_from(token))) return true;
    }
    return false;
  }

  Floats at(int64_t token) const {
    return load(logits_ + token, lanes(vocab_ - token), floats(kNone));
  }

  const float* logits_ = nullptr;
  int64_t vocab_ = 0;
  Bounds bounds_{};
  Survey best_;               // of which the best logit and its token alone are known
  std::vector<float> tops_;  // largest that a logit of each panel can be
};

// Whether to screen at all: where texts are such that many panels could win, the head itself is read at once for a while.
class ScreenWorth {
 public:
  bool ask() {
    if (rest_ > 0) return --rest_ == 0;
    return true;
  }
  // share: of the panels that were exact.
  void saw(double share) {
    spent_ += kNew * (share - spent_);
    if (spent_ <= kMost) return;
    spent_ = kMost - kNew * kMost;
    rest_ = kRest;
  }

 private:
  static constexpr double kMost = 0.3, kNew = 0.1;
  static constexpr int kRest = 128;  // steps
  double spent_ = 0.0;
  int rest_ = 0;
};

}  // namespace outrider
