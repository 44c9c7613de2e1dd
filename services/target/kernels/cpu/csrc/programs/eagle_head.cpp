// The local EAGLE-3 head, which drafts from hidden states that the decoder stored for its tokens.
//
//   row j        the token at j + 1 with the state of the token at j; its key is stored in slot j
//   first step   committed tokens; their states are read from the pool and fused
//   later steps  one row a session: the token that the previous step sampled, with the residual stream it left
#include "program.h"

namespace outrider {

void Program::execute(const StoreState& op, int thread, const Call& call, Counter* next) {
  portions(*next, thread, call.batch.rows, [&](int64_t index) {
    const int64_t place = slots_[index] * call.state_width + op.column;
    if (bfloat16_) copy_as(static_cast<BF16*>(call.states) + place, row(kResidual, index), op.width);
    else copy_as(static_cast<float*>(call.states) + place, row(kResidual, index), op.width);
  });
}

void Program::execute(const LoadState& op, int thread, const Call& call, Counter* next) {
  portions(*next, thread, call.batch.rows, [&](int64_t index) {
    const int64_t place = slots_[index] * call.state_width;
    float* to = row(kHidden, index);
    for (int64_t i = 0; i < op.width; i += kLanes) {
      const Mask mask = lanes(op.width - i);
      store(to + i, bfloat16_ ? load(static_cast<const BF16*>(call.states) + place + i, mask)
                              : load(static_cast<const float*>(call.states) + place + i, mask), mask);
    }
  });
}

void Program::execute(const JoinEmbedding& op, int thread, const Call& call, Counter* next) {
  portions(*next, thread, call.batch.rows, [&](int64_t index) {
    float* to = row(kHidden, index);
    float* stream = row(kResidual, index);
    const int64_t width = op.table.width;
    read_row(op.table, call.batch.ids[index], to);
    normalise(op.embedding, to, to, width);
    normalise(op.state, stream, to + width, width);
    if (op.after_norm) copy_as(stream, to + width, width);
  });
}

// As `run` with several steps; the first step computes any number of rows of each session and samples after the last one.
int64_t Program::draft_chain(Call call, const MultiStep& multi_step) {
  run(call);
  const int64_t sessions = call.batch.sampled_rows;
  DraftStopRule stop_rule(multi_step, sessions);
  if (multi_step.steps == 1 || any_ends(multi_step, call.samples->tokens, sessions)) return 1;
  if (!stop_rule.continues(*call.samples)) return 1;
  std::vector<int64_t> positions(sessions), sample_positions(sessions), rows(sessions + 1), ones(sessions, 1);
  for (int64_t i = 0; i < sessions; ++i) {
    const int64_t last = call.batch.sampled[i];  // at least i, so no stream is overwritten before it is read
    if (last != i) std::memcpy(row(kResidual, i), row(kResidual, last), widths_[kResidual] * sizeof(float));
    positions[i] = call.batch.positions[last] + 1;
    sample_positions[i] = call.samples->positions[i] + 1;
    rows[i + 1] = i + 1;
  }
  BatchView view = call.batch;
  view.rows = view.spans = sessions;
  view.ids = call.samples->tokens;
  view.positions = view.start = positions.data();
  view.sampled = view.first = rows.data();
  view.committed = ones.data();
  call.batch = Batch(view);
  SampleCall samples = *call.samples;
  samples.positions = sample_positions.data();
  samples.tokens += sessions;
  if (samples.probabilities) samples.probabilities += sessions;
  call.samples = &samples;
  MultiStep rest = multi_step;
  --rest.steps;
  begin_ = join_operation_;
  const int64_t done = run(call, rest, &stop_rule);
  begin_ = 0;
  return 1 + done;
}

}  // namespace outrider
