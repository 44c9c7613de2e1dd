// A program's draws behind a screen; see screen.h.
#include "program.h"

namespace outrider {

namespace {

// Of more rows together so many panels could hold the largest logit that little is saved.
constexpr int64_t kFew = 4;

}  // namespace

// True if nobody reads the logits but the draws, and these need the largest ones alone.
bool Program::may_screen(const Call& call) const {
  const auto* head = operations_.empty() ? nullptr : std::get_if<Linear>(&operations_[head_]);
  if (!head || !head->screen.weight || !draws_ || call.draws->masks) return false;
  if (draws_->rows() != call.batch.sampled_rows || draws_->rows() > kFew) return false;
  for (int64_t row = 0; row < draws_->rows(); ++row) {
    if (!ScreenedRow::serves(draws_->how(row))) return false;
  }
  return true;
}

void Program::draw_screened(int thread, const Call& call) {
  const Linear& op = std::get<Linear>(operations_[head_]);
  const DrawCall& draws = draws_->call();
  Counter* next = &counters_[2 * operations_.size() + 2];
  portions(*next++, thread, draws.rows, [&](int64_t row) {
    const float* logits = call.logits + row * op.weight->outputs;
    screened_rows_[row].rough(logits, op.weight->outputs, bounds_of_row(op, thread, call, row), panels_);
  });
  pool_->barrier().wait();
  make_exact(op, thread, call, next);
  next += 2;
  portions(*next++, thread, draws.rows, [&](int64_t row) {
    draws.tokens[row] = screened_rows_[row].settle(draws_->how(row), draws.positions[row], panels_);
  });
  if (all_greedy_) return;
  pool_->barrier().wait();
  make_exact(op, thread, call, next);
  next += 2;
  portions(*next, thread, draws.rows, [&](int64_t row) {
    const Sampling& how = draws_->how(row);
    if (how.temperature != 0.0) draws.tokens[row] = screened_rows_[row].race(how, draws.positions[row], panels_);
  });
}

Bounds Program::bounds_of_row(const Linear& op, int thread, const Call& call, int64_t index) {
  alignas(64) float x[kNormWidth];
  normalise(op.norm, row(op.input, call.batch.sampled[index]), x, op.input_width);
  char* memory = scratch_[thread].as<char>();  // has room for many such rows
  const Operand wide = operand_in(memory, *op.weight, 1);
  const Operand narrow = operand_in(memory + operand_bytes(*op.weight, 1), *op.screen.weight, 1);
  fill_operand(wide, *op.weight, 0, x);
  fill_operand(narrow, *op.screen.weight, 0, x);
  return width_of_operand(op.weight->format) == 2 ? bounds_of<BF16>(op.screen, wide, narrow)
                                                : bounds_of<float>(op.screen, wide, narrow);
}

// The logits of the panels that somebody wants, of all rows. next: two counters
void Program::make_exact(const Linear& op, int thread, const Call& call, Counter* next) {
  constexpr int64_t kRun = 8;  // panels
  alignas(64) float scratch[kNormWidth];
  const int64_t rows = call.batch.sampled_rows;
  const Operand operand = operand_of(*op.weight, thread, next + 1, rows, [&](const Operand& to, int64_t index) {
    fill_row(op, call, *op.weight, to, index, scratch);
  });
  const Passes passes(*op.weight, rows);
  portions(*next, thread, (panels_.count() + kRun - 1) / kRun, [&](int64_t run) {
    for (int64_t panel = run * kRun; panel < std::min(panels_.count(), (run + 1) * kRun); ++panel) {
      if (!panels_.wanted(panel)) continue;
      multiply_panel(*op.weight, panel, operand, passes, [&](int64_t first, int64_t count, const float* tile) {
        store_plain(op, call, panel, first, count, tile);
      });
      panels_.settle(panel);
    }
  });
  pool_->barrier().wait();
}

void Program::prepare_screen() {
  const int64_t rows = draws_->rows();
  panels_.reset(std::get<Linear>(operations_[head_]).weight->panels);
  if (int64_t(screened_rows_.size()) < rows) screened_rows_.resize(rows);
  all_greedy_ = true;
  for (int64_t row = 0; row < rows; ++row) all_greedy_ = all_greedy_ && draws_->how(row).temperature == 0.0;
}

}  // namespace outrider
