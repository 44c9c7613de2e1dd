// A head that drafts behind a decoder, with the states that the decoder keeps of its rows (EAGLE-3).
//
//   row j      the token at j + 1 beside the state of the one at j; its key lies in the slot of j
//   first step committed tokens, whose states come from the pool and are fused
//   others     a row a session: the token that the step before drew, beside the stream that it left
#include "program.h"

namespace outrider {

void Program::execute(const Keep& op, int thread, const Call& call, Counter* next) {
  portions(*next, thread, call.batch.rows, [&](int64_t index) {
    const int64_t place = slots_[index] * call.state_width + op.column;
    if (bfloat16_) copy_as(static_cast<BF16*>(call.states) + place, row(kResidual, index), op.width);
    else copy_as(static_cast<float*>(call.states) + place, row(kResidual, index), op.width);
  });
}

void Program::execute(const Feed& op, int thread, const Call& call, Counter* next) {
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

void Program::execute(const Join& op, int thread, const Call& call, Counter* next) {
  portions(*next, thread, call.batch.rows, [&](int64_t index) {
    float* to = row(kHidden, index);
    float* stream = row(kResidual, index);
    const int64_t from = call.batch.ids[index] * op.width;
    for (int64_t i = 0; i < op.width; i += kLanes) {
      const Mask mask = lanes(op.width - i);
      store(to + i, op.table16 ? load(op.table16 + from + i, mask) : load(op.table32 + from + i, mask), mask);
    }
    normalise(op.embedding, to, to, op.width);
    normalise(op.state, stream, to + op.width, op.width);
    if (op.after_norm) copy_as(stream, to + op.width, op.width);
  });
}

// As `run`, of a burst whose first step computes any rows of each session, and draws after the last one.
int64_t Program::follow(Call call, const Burst& burst) {
  run(call);
  const int64_t sessions = call.batch.sampled_rows;
  Confidence confidence(burst, sessions);
  if (burst.steps == 1 || ends(burst, call.draws->tokens, sessions) || !confidence.goes_on(*call.draws)) return 1;
  std::vector<int64_t> positions(sessions), drawn(sessions), rows(sessions + 1), ones(sessions, 1);
  for (int64_t i = 0; i < sessions; ++i) {
    const int64_t last = call.batch.sampled[i];  // i or more, so that no stream is lost
    if (last != i) std::memcpy(row(kResidual, i), row(kResidual, last), widths_[kResidual] * sizeof(float));
    positions[i] = call.batch.positions[last] + 1;
    drawn[i] = call.draws->positions[i] + 1;
    rows[i + 1] = i + 1;
  }
  BatchView view = call.batch;
  view.rows = view.spans = sessions;
  view.ids = call.draws->tokens;
  view.positions = view.start = positions.data();
  view.sampled = view.first = rows.data();
  view.committed = ones.data();
  call.batch = Batch(view);
  DrawCall draws = *call.draws;
  draws.positions = drawn.data();
  draws.tokens += sessions;
  if (draws.seconds) draws.seconds += sessions, draws.odds += 2 * sessions;
  call.draws = &draws;
  Burst rest = burst;
  --rest.steps;
  begin_ = join_;
  const int64_t done = run(call, rest, &confidence);
  begin_ = 0;
  return 1 + done;
}

}  // namespace outrider
