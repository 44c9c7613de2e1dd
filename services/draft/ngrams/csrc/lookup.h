// Continuations of a context: a walk of the trie below every stored suffix, by recency (BFS) or by frequency (PROB).
//
// Scores are probabilities. The accuracy of a length is the probability that a suffix of that length continues as
// stored, given that no longer suffix does. The rest of the longest suffix's probability goes to the next suffix with
// other tokens, and so on. Children share by frequency.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <vector>

#include "trie.h"

namespace outrider {

struct Options {
  int32_t by_frequency;
  int32_t min_window, max_window;
  int32_t min_breadth, max_breadth;
  int32_t branch_length;
  int32_t limit;  // nodes of a draft
};

constexpr int kPool = 32;          // children that share a probability
constexpr int kCounted = 1024;     // children that are compared by frequency, the most recent ones
constexpr double kPriorWeight = 4.0, kFading = 0.999;

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
// The coupled noise of outrider/speculation/noise.py, rounded to float32 as there.
inline double noise(const uint32_t* key, uint32_t token) {
  const uint32_t bits = mix(mix((token * 0x9E3779B1u) ^ key[0]) ^ key[1]);
  return double(float(-std::log(-std::log((double(bits) + 0.5) * 0x1p-32))));
}

// How often suffixes of each length continued as stored; one object for greedy sessions, one for sampled ones.
class Accuracy {
 public:
  explicit Accuracy(int max_window) : max_(max_window), trials_(max_window + 1), hits_(max_window + 1) {}
  double operator()(int length) const {
    const int m = std::min(length, max_);
    const double prior = double(m) / (m + 2);
    return (hits_[m] + kPriorWeight * prior) / (trials_[m] + kPriorWeight);
  }
  void observe(int length, bool hit) {
    trials_[length] = trials_[length] * kFading + 1.0;
    hits_[length] = hits_[length] * kFading + (hit ? 1.0 : 0.0);
  }

 private:
  int max_;
  std::vector<double> trials_, hits_;
};

struct Anchor {
  uint32_t node;
  int window;
};

// Children of a node, counted up to those that share a probability.
inline int breadth(const Trie& trie, uint32_t node) {
  int count = 0;
  for (uint32_t child = trie[node].first; child != kNone && count < kPool; child = trie[child].next) ++count;
  return count;
}

// Stored suffixes of a context that have children, longest first.
inline void match(const Trie& trie, const Options& options, uint32_t namespace_id, const uint32_t* context,
                  int64_t count, std::vector<Anchor>& anchors) {
  anchors.clear();
  uint32_t base = kRoot;
  if (namespace_id != kNone && (base = trie.child(kRoot, namespace_id)) == kNone) return;
  for (int window = int(std::min<int64_t>(count, options.max_window)); window >= options.min_window; --window) {
    uint32_t node = base;
    for (int64_t i = count - window; i < count && node != kNone; ++i) node = trie.child(node, context[i]);
    if (node != kNone && trie[node].first != kNone) anchors.push_back({node, window});
  }
}

class Lookup {
 public:
  std::vector<uint32_t> tokens;
  std::vector<int32_t> parents;
  std::vector<float> log_scores;

  // keys: of the positions of the root's children and of those below, two words each; null without noise.
  void run(const Trie& trie, const Options& options, const Accuracy& accuracy, const std::vector<Anchor>& anchors,
           const uint32_t* keys) {
    trie_ = &trie, options_ = &options, accuracy_ = &accuracy, keys_ = keys;
    tokens.clear(), parents.clear(), log_scores.clear(), depths_.clear();
    options.by_frequency ? by_frequency(anchors) : by_recency(anchors);
  }

 private:
  struct Child {
    uint32_t node;
    double share;
  };
  struct Queued {
    int32_t parent;
    double breadth;
    uint32_t node;
  };
  struct Ranked {
    double probability;
    int64_t arrival;
    int32_t parent;
    uint32_t node;
    int window;
    double share, mass;
    bool operator<(const Ranked& other) const {  // the best is on top of the heap
      return probability != other.probability ? probability < other.probability : arrival > other.arrival;
    }
  };

  bool full() const { return int(tokens.size()) >= options_->limit; }

  int32_t find(int32_t parent, uint32_t token) const {
    for (size_t i = 0; i < tokens.size(); ++i)
      if (tokens[i] == token && parents[i] == parent) return int32_t(i);
    return -1;
  }

  // Add a node, or raise its score. A child of the root keeps the score of the longest suffix.
  int32_t add(int32_t parent, uint32_t token, double probability) {
    const float score = float(std::log(probability));
    int32_t node = find(parent, token);
    if (node < 0) {
      node = int32_t(tokens.size());
      tokens.push_back(token);
      parents.push_back(parent);
      depths_.push_back(parent < 0 ? 1 : depths_[parent] + 1);
      log_scores.push_back(score);
    } else if (parent >= 0) {
      log_scores[node] = std::max(log_scores[node], score);
    }
    return node;
  }

  double edge_accuracy(int32_t parent, int window, double mass) const {
    return parent < 0 ? mass : (*accuracy_)(window + depths_[parent]);
  }

  // Splits the remaining probability; an anchor without new tokens gets all of it and leaves the rest unchanged.
  double share_of(double& rest, const Anchor& anchor) {
    gather(anchor.node, kPool);
    for (uint32_t child : pool_) {
      if (find(-1, (*trie_)[child].token) >= 0) continue;
      const double mass = rest * (*accuracy_)(anchor.window);
      rest -= mass;
      return mass;
    }
    return rest;
  }

  void by_recency(const std::vector<Anchor>& anchors) {
    const Options& o = *options_;
    const double scale = double(o.max_breadth - o.min_breadth) / (o.max_window - o.min_window + 1);
    double rest = 1.0;
    for (const Anchor& anchor : anchors) {
      const double mass = share_of(rest, anchor);
      queue_.clear();
      queue_.push_back({-1, (o.max_window - anchor.window) * scale + o.min_breadth, anchor.node});
      for (size_t at = 0; at < queue_.size(); ++at) {
        const Queued entry = queue_[at];
        children(entry.node, std::max(1, int(entry.breadth)), entry.parent, chosen_);
        for (const Child& child : chosen_) {
          if (full()) return;
          const double chance = child.share * edge_accuracy(entry.parent, anchor.window, mass);
          const int32_t place = add(entry.parent, (*trie_)[child.node].token, chance);
          queue_.push_back({place, entry.breadth - scale, child.node});
        }
      }
    }
  }

  void by_frequency(const std::vector<Anchor>& anchors) {
    heap_.clear();
    int64_t arrivals = 0;
    double rest = 1.0;
    for (const Anchor& anchor : anchors) {
      double probability = 1.0, mass = share_of(rest, anchor);
      int32_t parent = -1;
      uint32_t node = anchor.node;
      int window = anchor.window;
      while (true) {
        children(node, options_->max_breadth, parent, chosen_);
        for (const Child& child : chosen_) {
          heap_.push_back({probability * child.share, ++arrivals, parent, child.node, window, child.share, mass});
          std::push_heap(heap_.begin(), heap_.end());
        }
        if (heap_.empty() || full()) break;
        std::pop_heap(heap_.begin(), heap_.end());
        const Ranked best = heap_.back();
        heap_.pop_back();
        window = best.window, mass = best.mass, probability = best.probability, node = best.node;
        parent = add(best.parent, (*trie_)[node].token, best.share * edge_accuracy(best.parent, window, mass));
      }
    }
  }

  // Up to `count` children, best first, with their share of the probability that is not yet proposed.
  void children(uint32_t node, int count, int32_t parent, std::vector<Child>& chosen) {
    chosen.clear();
    const uint32_t first = (*trie_)[node].first;
    if (first == kNone) return;
    const bool noisy = keys_ != nullptr && (*trie_)[first].next != kNone;
    gather(node, noisy || !options_->by_frequency ? kPool : count);
    weights_.resize(pool_.size());
    double most = -INFINITY;
    for (size_t i = 0; i < pool_.size(); ++i) {
      const Node& child = (*trie_)[pool_[i]];
      weights_[i] = double(child.frequency);
      if (noisy) {
        const int depth = parent < 0 ? 0 : depths_[parent];
        weights_[i] = std::log(weights_[i]) + noise(keys_ + 2 * depth, child.token);
        most = std::max(most, weights_[i]);
      }
    }
    order_.resize(pool_.size());
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = int(i);
    if (noisy) {
      std::stable_sort(order_.begin(), order_.end(), [this](int a, int b) { return weights_[a] > weights_[b]; });
      for (double& weight : weights_) weight = std::exp(weight - most);
    }
    double total = 0.0;
    for (size_t i = 0; i < pool_.size(); ++i)
      if (parent >= 0 || find(-1, (*trie_)[pool_[i]].token) < 0) total += weights_[i];
    for (size_t i = 0; i < std::min(order_.size(), size_t(count)); ++i) {
      const double share = total > 0.0 ? weights_[order_[i]] / total : 1.0;
      chosen.push_back({pool_[order_[i]], std::max(std::min(share, 1.0), 1e-6)});
    }
  }

  // Up to `count` of the most recent children, or of the most frequent ones.
  void gather(uint32_t node, int count) {
    pool_.clear();
    uint32_t child = (*trie_)[node].first;
    if (!options_->by_frequency) {
      for (; child != kNone && int(pool_.size()) < count; child = (*trie_)[child].next) pool_.push_back(child);
      return;
    }
    for (int seen = 0; child != kNone && seen < kCounted; ++seen, child = (*trie_)[child].next) {
      const uint32_t frequency = (*trie_)[child].frequency;
      if (int(pool_.size()) == count && (*trie_)[pool_.back()].frequency >= frequency) continue;
      size_t place = pool_.size();
      while (place > 0 && (*trie_)[pool_[place - 1]].frequency < frequency) --place;
      pool_.insert(pool_.begin() + place, child);
      if (int(pool_.size()) > count) pool_.pop_back();
    }
  }

  const Trie* trie_ = nullptr;
  const Options* options_ = nullptr;
  const Accuracy* accuracy_ = nullptr;
  const uint32_t* keys_ = nullptr;
  std::vector<int> depths_;
  std::vector<Queued> queue_;
  std::vector<Ranked> heap_;
  std::vector<Child> chosen_;
  std::vector<uint32_t> pool_;
  std::vector<double> weights_;
  std::vector<int> order_;
};

}  // namespace outrider
