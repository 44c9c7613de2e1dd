// y = x W^T for the few rows of a round: each weight is read once for all of them.
#pragma once

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
void product(Crew& crew, const Weight& weight, const X* x, int64_t rows, Y* y) {
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
    share(crew, rows, [&](int64_t row) { fill(operand, row); });
  }
  Portions portions(weight.panels, crew.threads());
  crew.run([&] {
    static thread_local Buffer own;
    const Operand operand = laid_out(together ? shared : own);
    for (int64_t row = 0; row < rows && !together; ++row) fill(operand, row);
    const Passes passes(weight, rows);
    for (int64_t panel, end; portions.take(panel, end);) {
      for (; panel < end; ++panel) {
        multiply_panel(weight, panel, operand, passes, [&](int64_t first, int64_t count, const float* tile) {
          store_panel(weight, panel, first, count, tile, nullptr, y);
        });
      }
    }
  });
}

}  // namespace outrider
