// The C functions that services/draft/ngrams/compiled.py binds.
#include <algorithm>
#include <new>

#include "lookup.h"

using namespace outrider;

namespace {

struct Ngrams {
  Ngrams(uint32_t capacity, const Options& options)
      : options(options), trie(capacity),
        accuracy{Accuracy(options.max_window), Accuracy(options.max_window)} {}
  Options options;
  Trie trie;
  Accuracy accuracy[2];  // without noise, with noise
  Lookup lookup;
  std::vector<Anchor> anchors;
};

void observe(Ngrams& ngrams, uint32_t namespace_id, const uint32_t* tokens, int64_t place, bool noisy) {
  match(ngrams.trie, ngrams.options, namespace_id, tokens, place, ngrams.anchors);
  int known = 0;
  for (const Anchor& anchor : ngrams.anchors) {
    const int found = breadth(ngrams.trie, anchor.node);
    if (found <= known && known < kPool) continue;  // this suffix proposes no token that longer ones do not
    known = found;
    const bool hit = ngrams.trie.child(anchor.node, tokens[place]) != kNone;
    ngrams.accuracy[noisy].observe(anchor.window, hit);
    if (hit) return;
  }
}

void insert(Ngrams& ngrams, uint32_t namespace_id, const uint32_t* tokens, int64_t count, int64_t first, int64_t stop) {
  stop = std::min(stop, count - ngrams.options.min_window);
  for (int64_t start = first; start < stop; ++start)
    ngrams.trie.insert(namespace_id, tokens + start, std::min<int64_t>(ngrams.options.branch_length, count - start));
}

}  // namespace

extern "C" {

Ngrams* outrider_ngrams_new(uint32_t capacity, const Options* options) {
  try {
    return new Ngrams(capacity, *options);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void outrider_ngrams_free(Ngrams* ngrams) { delete ngrams; }
void outrider_ngrams_clear(Ngrams* ngrams) { ngrams->trie.clear(); }
int64_t outrider_ngrams_size(const Ngrams* ngrams) { return ngrams->trie.size(); }
int64_t outrider_ngrams_bytes(const Ngrams* ngrams) { return ngrams->trie.bytes(); }
double outrider_ngrams_accuracy(const Ngrams* ngrams, int32_t length, int32_t noisy) {
  return ngrams->accuracy[noisy](length);
}

// Store the paths of a sequence that begin at `first` or later, before `stop`.
void outrider_ngrams_insert(Ngrams* ngrams, uint32_t namespace_id, const uint32_t* tokens, int64_t count, int64_t first,
                            int64_t stop) {
  insert(*ngrams, namespace_id, tokens, count, first, stop);
}

// The last `fresh` tokens were committed: update the accuracies of suffixes, then store the paths with them if `keep`.
void outrider_ngrams_commit(Ngrams* ngrams, uint32_t namespace_id, const uint32_t* tokens, int64_t count, int64_t fresh,
                            int32_t noisy, int32_t keep) {
  for (int64_t place = std::max<int64_t>(count - fresh, 1); place < count; ++place)
    observe(*ngrams, namespace_id, tokens, place, noisy);
  if (!keep) return;
  const int64_t length = std::min<int64_t>(count, ngrams->options.branch_length + fresh - 1);
  insert(*ngrams, namespace_id, tokens + count - length, length, 0, length);
}

// Returns the number of nodes; the arrays have room for Options.limit.
int64_t outrider_ngrams_look_up(Ngrams* ngrams, uint32_t namespace_id, const uint32_t* context, int64_t count,
                                const uint32_t* keys, uint32_t* tokens, int32_t* parents, float* log_scores) {
  match(ngrams->trie, ngrams->options, namespace_id, context, count, ngrams->anchors);
  Lookup& lookup = ngrams->lookup;
  lookup.run(ngrams->trie, ngrams->options, ngrams->accuracy[keys != nullptr], ngrams->anchors, keys);
  const size_t found = lookup.tokens.size();
  std::copy_n(lookup.tokens.begin(), found, tokens);
  std::copy_n(lookup.parents.begin(), found, parents);
  std::copy_n(lookup.log_scores.begin(), found, log_scores);
  return int64_t(found);
}

// All children at the end of a path: tokens and frequencies, the most recent first. For tests.
int64_t outrider_ngrams_children(const Ngrams* ngrams, const uint32_t* path, int64_t length, uint32_t* tokens,
                                 uint32_t* frequencies, int64_t room) {
  uint32_t node = kRoot;
  for (int64_t i = 0; i < length && node != kNone; ++i) node = ngrams->trie.child(node, path[i]);
  if (node == kNone) return -1;
  int64_t count = 0;
  for (uint32_t child = ngrams->trie[node].first; child != kNone && count < room; child = ngrams->trie[child].next) {
    tokens[count] = ngrams->trie[child].token;
    frequencies[count++] = ngrams->trie[child].frequency;
  }
  return count;
}

}  // extern "C"
