// y = x W^T for the few rows of a round: each weight is read once for all of them.
#pragma once

#include <vector>

#include "linear.h"
#include "threads.h"

namespace outrider {

// From so many rows on threads share the work of laying rows out; below, each does it for itself.
constexpr int64_t kSharedRows = 24;

// Portions of neighbouring panels: long ones first, because memory is fastest when it is read on and on, then shorter
// ones, so that threads are done at like times.
class Portions {
 public:
  Portions(int64_t panels, int threads) : panels_(panels), threads_(threads) {}

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
void product(Pool& pool, const Weight& weight, const X* x, int64_t rows, Y* y) {
  Portions portions(weight.panels, pool.threads());
  static Buffer shared;
  const bool together = rows > kSharedRows;
  if (together && shared.bytes() < operand_bytes(weight, rows)) shared = Buffer(operand_bytes(weight, rows));
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    static thread_local Buffer own;
    if (!together && own.bytes() < operand_bytes(weight, rows)) own = Buffer(operand_bytes(weight, kSharedRows));
    const Operand operand = operand_in((together ? shared : own).template as<char>(), weight, rows);
    auto fill = [&](int64_t row) { fill_operand(operand, weight, row, x + row * weight.inputs); };
    if (together) {
      for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;) fill(row);
      pool.barrier().wait();
    } else {
      for (int64_t row = 0; row < rows; ++row) fill(row);
    }
    for (int64_t panel, end; portions.take(panel, end);) {
      for (; panel < end; ++panel) {
        multiply_panel(weight, panel, operand, rows, [&](int64_t first, int64_t count, const float* tile) {
          const int64_t n = panel * kPanel;
          for (int64_t row = first; row < first + count; ++row, tile += kPanel) {
            Y* to = y + row * weight.outputs + n;
            store(to, load(tile), lanes(weight.outputs - n));
            store(to + kLanes, load(tile + kLanes), lanes(weight.outputs - n - kLanes));
          }
        });
      }
    }
  });
}

}  // namespace outrider
