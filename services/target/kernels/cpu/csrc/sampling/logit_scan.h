// One pass over the logits of a row: the largest one, and block maxima that bound where other large ones are.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace outrider {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// A float32 not above the bound, so that no logit at or above the bound is left out.
inline float below(double bound) { return std::nextafter(float(bound), kNone); }

// The logits of a row, perhaps masked by a grammar.
struct LogitRow {
  const float* logits;      // [vocab]
  const uint16_t* allowed;  // bit i of word j: token 16 j + i is allowed; null: all are
  int64_t vocab;
  const int32_t* ids;       // [vocab], ascending token ids of the logits; null if they are the vocabulary in order

  Ints ids_at(int64_t i) const { return ids ? load_ints(ids + i, lanes(vocab - i)) : ids_from(i); }
  int64_t id_of(int64_t place) const { return ids && place >= 0 ? ids[place] : place; }
  int64_t place_of(int64_t id) const { return ids ? std::lower_bound(ids, ids + vocab, id) - ids : id; }

  // The logits of 16 tokens; -inf for tokens not allowed and past the end.
  Floats at(int64_t i) const {
    Mask mask = lanes(vocab - i);
    if (allowed && mask) mask = Mask(mask & allowed[i / kLanes]);
    return mask == 0xFFFF ? load(logits + i) : load(logits + i, mask, floats(kNone));
  }
};

// The result of one pass over a row. A block is 16 vectors; group i of a block is lane i of its vectors.
struct LogitScan {
  static constexpr int64_t kBlock = 16 * kLanes;
  std::vector<float> maxima;  // of the groups, 16 a block
  int64_t blocks = 0;
  float best = kNone;
  int64_t token = -1;  // the first token with that logit; -1 if the logits are not finite

  void take(const LogitRow& row) {
    blocks = (row.vocab + kBlock - 1) / kBlock;
    if (int64_t(maxima.size()) < blocks * kLanes) maxima.resize(blocks * kLanes);
    Floats top = floats(kNone);
    Mask any_nan = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      Floats group[2] = {top, top};
      for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
        const Floats x = row.at(block * kBlock + i), y = row.at(block * kBlock + i + kLanes);
        any_nan = Mask(any_nan | unordered(x, y));
        group[0] = max(group[0], x);
        group[1] = max(group[1], y);
      }
      store(maxima.data() + block * kLanes, max(group[0], group[1]));
    }
    for (int64_t block = 0; block < blocks; ++block) top = max(top, groups(block));
    best = largest_of(top);
    token = any_nan || !std::isfinite(best) ? -1 : row.id_of(first_best(row));
  }

  Floats groups(int64_t block) const { return load(maxima.data() + block * kLanes); }
  bool reaches(int64_t block, Floats least) const {
    return greater_equal(groups(block), least) != 0;
  }

  // A logit that at least `count` tokens reach and, by the groups' maxima, few more.
  float least_of(int64_t count) const {
    if (count > blocks * kLanes || reached_by(std::numeric_limits<float>::lowest()) < count) return kNone;
    float low = std::numeric_limits<float>::lowest(), high = best;
    const int64_t enough = count + count / 4;
    // Start near the largest logit, where the candidates usually are.
    for (float width = 1.0f; width < 1e6f; width *= 2.0f) {
      if (best - width <= low) break;
      if (reached_by(best - width) >= count) {
        low = best - width;
        break;
      }
      high = best - width;
    }
    for (int iteration = 0; iteration < 24 && reached_by(low) > enough; ++iteration) {
      const float middle = low + (high - low) * 0.5f;
      (reached_by(middle) >= count ? low : high) = middle;
    }
    return low;
  }

 private:
  int64_t reached_by(float least) const {
    int64_t count = 0;
    const Floats limit = floats(least);
    for (int64_t block = 0; block < blocks; ++block) {
      count += __builtin_popcount(greater_equal(groups(block), limit));
    }
    return count;
  }

  int64_t first_best(const LogitRow& row) const {
    const Floats limit = floats(best);
    int64_t i = 0;
    while (!reaches(i / kBlock, limit)) i += kBlock;
    for (;; i += kLanes) {
      if (const Mask hit = equal(row.at(i), limit)) return i + __builtin_ctz(hit);
    }
  }
};

}  // namespace outrider
