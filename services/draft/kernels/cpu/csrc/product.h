// y = x W^T for the few rows of a step: each weight is read once for all of them.
#pragma once

#include "products/linear.h"
#include "threads.h"

namespace outrider {

// From this number of rows on, threads lay out rows together; below it, each thread lays out all of them.
constexpr int64_t kSharedRows = 24;

// Ranges of neighbouring panels: long ones first, because long streams read memory fastest, then shorter ones, so that
// all threads finish at about the same time.
class PanelRanges {
 public:
  PanelRanges(int64_t panels, int threads) : panels_(panels), threads_(threads) {}

  bool take(int64_t& begin, int64_t& end) {
    begin = next_.load(std::memory_order_relaxed);
    do {
      if (begin >= panels_) return false;
      end = begin + std::max<int64_t>(1, (panels_ - begin) / (2 * threads_));
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
  }

 private:
  const int64_t panels_, threads_;
  std::atomic<int64_t> next_{0};
};

// X: of rows x [rows, weight.inputs]; Y: of results [rows, weight.outputs].
template <class X, class Y>
void product(ThreadPool& pool, const Weight& weight, const X* x, int64_t rows, Y* y) {
  static Buffer shared;
  const bool together = rows > kSharedRows;
  auto laid_out = [&](Buffer& memory) {
    if (memory.bytes() < operand_bytes(weight, rows)) memory = Buffer(operand_bytes(weight, rows));
    return operand_in(memory.as<char>(), weight, rows);
  };
  auto fill = [&](const Operand& operand, int64_t row) {
    fill_operand(operand, weight, row, x + row * weight.inputs);
  };
  if (together) {
    const Operand operand = laid_out(shared);
    parallel_for(pool, rows, [&](int64_t row) { fill(operand, row); });
  }
  PanelRanges ranges(weight.panels, pool.threads());
  pool.run([&] {
    static thread_local Buffer own;
    const Operand operand = laid_out(together ? shared : own);
    for (int64_t row = 0; row < rows && !together; ++row) fill(operand, row);
    const Passes passes(weight, rows);
    for (int64_t begin, end; ranges.take(begin, end);) {
      multiply_panels(weight, begin, end, operand, passes,
                      [&](int64_t panel, int64_t first, int64_t count, const float* tile) {
                        store_panel(weight, panel, first, count, tile, nullptr, y);
                      });
    }
  });
}

}  // namespace outrider
