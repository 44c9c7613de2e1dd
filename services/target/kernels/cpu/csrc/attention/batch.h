// The rows of one step, in the layout of services/target/step/batch.py.
#pragma once

#include <cstdint>
#include <vector>

namespace outrider {

// Pointers into arrays of the caller, valid for one call.
struct BatchView {
  int64_t rows, spans, sampled_rows, page_size;
  const int64_t* ids;        // [rows]
  const int64_t* positions;  // [rows], logical: a row sees positions + 1 keys
  const int64_t* sampled;    // [sampled_rows]
  const int64_t* first;      // [spans + 1], the spans' first rows
  const int64_t* start;      // [spans], keys in the cache already
  const int64_t* committed;  // [spans], rows that are committed tokens; the others are draft nodes
  const int32_t* parents;    // the spans' nodes one after the other: parent among the span's nodes, negative is the root
  const int32_t* pages;      // the spans' page tables one after the other
  const int64_t* table;      // [spans], where each begins in `pages`
};

// A view with data derived from it.
struct Batch : BatchView {
  std::vector<int32_t> path;        // the nodes' paths, as rows of their own span, from below the root to themselves
  std::vector<int64_t> path_begin;  // [rows + 1], in `path`; empty for committed rows

  Batch() : BatchView{} {}
  explicit Batch(const BatchView& view) : BatchView(view), path_begin(view.rows + 1) {
    const int32_t* parent = parents;
    for (int64_t span = 0; span < spans; ++span) {
      const int64_t nodes = first[span] + committed[span];
      for (int64_t row = first[span]; row < first[span + 1]; ++row) {
        path_begin[row] = int64_t(path.size());
        if (row < nodes) continue;
        if (const int32_t up = *parent++; up >= 0) {
          for (int64_t i = path_begin[nodes + up]; i < path_begin[nodes + up + 1]; ++i) path.push_back(path[i]);
        }
        path.push_back(int32_t(row - first[span]));
        path_begin[row + 1] = int64_t(path.size());
      }
    }
    path_begin[rows] = int64_t(path.size());
  }

  // The cache slot of a span's key. key: index among the span's keys, cached ones first.
  int64_t slot(int64_t span, int64_t key) const {
    return int64_t{pages[table[span] + key / page_size]} * page_size + key % page_size;
  }

  // The slots of keys from .. to - 1, page by page, because divisions are slow.
  void slots(int64_t span, int64_t from, int64_t to, int64_t* slots) const {
    if (from >= to) return;
    const int32_t* page = pages + table[span] + from / page_size;
    for (int64_t offset = from % page_size; from < to; offset = 0, ++page) {
      for (; offset < page_size && from < to; ++offset, ++from) *slots++ = int64_t{*page} * page_size + offset;
    }
  }
};

}  // namespace outrider
