// A program's sampling from approximate logits; see pruned_head.h.
#include "program.h"

namespace outrider {

namespace {

// With more rows, most panels may hold a largest logit, and little is saved.
constexpr int64_t kFew = 4;

}  // namespace

// True if only sampling reads the logits, and it needs the largest ones alone.
bool Program::may_prune(const Call& call) const {
  const auto* head = operations_.empty() ? nullptr : std::get_if<Linear>(&operations_[head_]);
  if (!head || !head->pruned_head.weight || !samples_ || call.samples->masks) return false;
  if (samples_->rows() != call.batch.sampled_rows || samples_->rows() > kFew) return false;
  for (int64_t row = 0; row < samples_->rows(); ++row) {
    if (!PrunedRow::serves(samples_->params(row))) return false;
  }
  return true;
}

void Program::sample_pruned(int thread, const Call& call) {
  const Linear& op = std::get<Linear>(operations_[head_]);
  const SampleCall& samples = samples_->call();
  Counter* next = &counters_[2 * operations_.size() + 2];
  portions(*next++, thread, samples.rows, [&](int64_t row) {
    const float* logits = call.logits + row * op.weight->outputs;
    pruned_rows_[row].rough(logits, op.weight->outputs, bounds_of_row(op, thread, call, row), panel_states_);
  });
  pool_->barrier().wait();
  make_exact(op, thread, call, next);
  next += 2;
  portions(*next++, thread, samples.rows, [&](int64_t row) {
    samples.tokens[row] = pruned_rows_[row].settle(samples_->params(row), samples.positions[row], panel_states_);
  });
  if (all_greedy_) return;
  pool_->barrier().wait();
  make_exact(op, thread, call, next);
  next += 2;
  portions(*next, thread, samples.rows, [&](int64_t row) {
    const Sampling& params = samples_->params(row);
    if (params.temperature == 0.0) return;
    samples.tokens[row] = pruned_rows_[row].sample_noisy(params, samples.positions[row], panel_states_);
  });
}

LogitBounds Program::bounds_of_row(const Linear& op, int thread, const Call& call, int64_t index) {
  alignas(64) float x[kNormWidth];
  normalise(op.norm, row(op.input, call.batch.sampled[index]), x, op.input_width);
  char* memory = scratch_[thread].as<char>();  // holds many such rows
  const Operand wide = operand_in(memory, *op.weight, 1);
  const Operand narrow = operand_in(memory + operand_bytes(*op.weight, 1), *op.pruned_head.weight, 1);
  fill_operand(wide, *op.weight, 0, x);
  fill_operand(narrow, *op.pruned_head.weight, 0, x);
  return width_of_operand(op.weight->format) == 2 ? bounds_of<BF16>(op.pruned_head, wide, narrow)
                                                : bounds_of<float>(op.pruned_head, wide, narrow);
}

// Computes the wanted panels' logits exactly, for all rows. next: two counters
void Program::make_exact(const Linear& op, int thread, const Call& call, Counter* next) {
  constexpr int64_t kRun = 8;  // panels
  alignas(64) float scratch[kNormWidth];
  const int64_t rows = call.batch.sampled_rows;
  const Operand operand = operand_of(*op.weight, thread, next + 1, rows, [&](const Operand& to, int64_t index) {
    fill_row(op, call, *op.weight, to, index, scratch);
  });
  const Passes passes(*op.weight, rows);
  portions(*next, thread, (panel_states_.count() + kRun - 1) / kRun, [&](int64_t run) {
    for (int64_t panel = run * kRun; panel < std::min(panel_states_.count(), (run + 1) * kRun); ++panel) {
      if (!panel_states_.wanted(panel)) continue;
      multiply_panel(*op.weight, panel, operand, passes, [&](int64_t first, int64_t count, const float* tile) {
        store_plain(op, call, panel, first, count, tile);
      });
      panel_states_.settle(panel);
    }
  });
  pool_->barrier().wait();
}

void Program::prepare_pruning() {
  const int64_t rows = samples_->rows();
  panel_states_.reset(std::get<Linear>(operations_[head_]).weight->panels);
  if (int64_t(pruned_rows_.size()) < rows) pruned_rows_.resize(rows);
  all_greedy_ = true;
  for (int64_t row = 0; row < rows; ++row) all_greedy_ = all_greedy_ && samples_->params(row).temperature == 0.0;
}

}  // namespace outrider
