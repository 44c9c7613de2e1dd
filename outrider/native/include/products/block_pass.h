// What products with panels of a block format (format.h) share between instruction sets.
//
// Per group and part of it (a block of each output), whole numbers are summed up: values times the row's 8-bit numbers. These
// sums meet the block's scale, the sums of the row's numbers its minimum, and what a group comes to the row's scale. Each row's
// sums run over parts and groups in this order, so a row's result does not depend on the batch.
#pragma once

#include "weights/block_rows.h"
#include "products/panel_pass.h"

namespace outrider {

// A group of a panel: its values, its super-block's units, and its number. line: 128 bytes each, from the panel's first one
struct GroupPlace {
  const char *values, *units;
  int64_t index, line;
};

// A group's parts lie in runs of lines, whose lower and upper halves are a part each (with 8 bits: its first and last lines).
template <Format FORMAT>
struct BlockTraits {
  static constexpr BlockFormat kFormat = block_format(FORMAT);
  static constexpr int kUpper = kFormat.upper_bits();
  static constexpr int kParts = kFormat.parts(), kRuns = kParts / 2;
  static constexpr int kLines = kGroup / 8 / kRuns;              // of a run
  static constexpr int kStretch = kUpper ? 4 / kUpper : kLines;  // lines whose upper bits one shift brings into place
  static constexpr int kStretches = kLines / kStretch;           // of a run
  static constexpr int kFetches = int(kFormat.group_bytes() / 128);

  // Scales (kind 0) or minima (kind 1) of a part's blocks.
  static const char* numbers(const GroupPlace& place, int kind, int part) {
    return place.values + kFormat.value_bytes() + kind * kFormat.scale_bytes() + part * kPanel * (kFormat.units ? 1 : 2);
  }
  // Where the first row's correction or sum is, of a part.
  static int64_t sums_at(const Pass& pass, const GroupPlace& place, int part) {
    return (place.index * kParts + part) * pass.x.rows + pass.row;
  }
};

// function(place) for all groups of a pass, in order.
template <Format FORMAT, class Function>
[[gnu::always_inline]] inline void each_group(const Pass& pass, Function&& function) {
  constexpr BlockFormat kFormat = block_format(FORMAT);
  const char* at = pass.begin();
  const int64_t groups = pass.weight.k / kGroup;
  for (int64_t index = 0; index < groups;) {
    const char* units = at;
    if (kFormat.units) pass.fetch((at - pass.begin()) / 128);
    at += kFormat.unit_bytes();
    for (int64_t i = 0; i < pass.weight.groups; ++i, ++index, at += kFormat.group_bytes()) {
      function(GroupPlace{at, units, index, (at - pass.begin()) / 128});
    }
  }
}

// Some rows, and the panel's vectors of WIDTH outputs from `first` on, over a group. As RunOf (panel_runs.h).
template <int WIDTH>
struct BlockRunOf {
  const Pass& pass;
  const GroupPlace& place;
  const int first;

  float* tile(int m, int v) const { return pass.tile + m * kPanel + (first + v) * WIDTH; }
  template <Format FORMAT, int V>
  [[gnu::always_inline]] void fetch(int64_t i) const {
    if (i >= BlockTraits<FORMAT>::kFetches) return;
    if (V * WIDTH == kPanel) return pass.fetch(place.line + i);
    pass.fetch_half(place.line + i, first / V);
  }
};

}  // namespace outrider
