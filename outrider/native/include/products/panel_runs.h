// Passes in runs, for processors whose registers do not hold the sums of a whole panel: a run computes some vectors of a
// panel's outputs over a block of k. Runs cover a block one after the other, so that the panel is read once from start to
// end, and the tile accumulates their sums.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "panel_pass.h"

namespace outrider {

constexpr int kDotRows = 6;     // rows of one pass over a panel
constexpr int64_t kLine = 128;  // bytes of a panel for a step of k

// f(0), f(1), ... with constants, so that what they index lies in registers: loops are unrolled too late for that, and sums
// would go through memory in every step.
#define INLINED __attribute__((always_inline))
template <class F, int... I>
[[gnu::always_inline]] inline void each_of(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
[[gnu::always_inline]] inline void each(F&& f) {
  each_of(std::make_integer_sequence<int, N>(), f);
}

// Numbers of k that a run goes over: a group, or, where there are none, what the first cache holds beside the rows.
constexpr int64_t block_of(Format format) { return format == Format::kBFloat16 ? 2 * kGroup : kGroup; }

// Some rows, the panel's vectors of WIDTH outputs from `first` on, and a block of k. weight, x: where these begin, x of the
// first row, whose next chunk is `jump` bytes further. line: how many are before the block's. Two runs over a block fetch
// half each.
template <int WIDTH>
struct RunOf {
  const Pass& pass;
  const int64_t block, line, jump;
  const int first;
  const char *weight, *x;

  float* tile(int m, int v) const { return pass.tile + m * kPanel + (first + v) * WIDTH; }
  template <int V>
  void fetch(int64_t step) const {
    if (V * WIDTH == kPanel) return pass.fetch(line + step);
    pass.fetch_half(line + step, first / V);
  }
};

// Multiplies a panel with M rows, in runs of V vectors of WIDTH outputs. run(RunOf<WIDTH>): adds a run's sums to the tile.
template <int M, int V, int WIDTH, class F>
[[gnu::always_inline]] inline void multiply_in_runs(const Pass& pass, F&& run) {
  const Format format = pass.weight.format;
  const int64_t numbers = block_of(format), bytes = bytes_of_panel(format, numbers);  // of a block
  const int64_t chunks = numbers * width_of_operand(format) / bytes_of_chunk(format), jump = pass.x.rows * bytes_of_chunk(format);
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  const char *weight = pass.begin(), *x = pass.chunk(0);
  for (int64_t block = 0; block * numbers < pass.weight.k; ++block, weight += bytes, x += chunks * jump) {
    for (int first = 0; first < kPanel / WIDTH; first += V) {
      run(RunOf<WIDTH>{pass, block, block * bytes / kLine, jump, first, weight + first * WIDTH * 4, x});
    }
  }
  if (format == Format::kInt8) pass.scale_columns(M);
}

}  // namespace outrider
