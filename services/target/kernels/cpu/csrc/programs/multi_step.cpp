// Multi-step decoding: several plain steps of the same sessions.
#include "program.h"

#include <algorithm>

namespace outrider {

bool any_ends(const MultiStep& multi_step, const int64_t* tokens, int64_t rows) {
  const int64_t* stop = multi_step.stops;
  for (int64_t row = 0; row < rows; stop += multi_step.stop_counts[row++]) {
    const int64_t* end = stop + multi_step.stop_counts[row];
    if (tokens[row] < 0 || std::find(stop, end, tokens[row]) != end) return true;
  }
  return false;
}

bool occurs_earlier(const uint32_t* text, int64_t length, int64_t repeat_length) {
  const uint32_t* last = text + length - 1;
  const Ints wanted = ints(int32_t(*last));
  for (int64_t place = repeat_length - 1; place < length - 1; place += kLanes) {
    const Mask there = lanes(length - 1 - place);
    Mask found = Mask(there & equal(load_ints(text + place, there), wanted));
    for (; found; found = Mask(found & (found - 1))) {
      const uint32_t* other = text + place + __builtin_ctz(found);
      if (std::equal(last - (repeat_length - 1), last, other - (repeat_length - 1))) return true;
    }
  }
  return false;
}

namespace {

// Appends the tokens that step number `done` sampled to the sessions' texts, where there are any. Returns whether one of
// the texts repeats.
bool repeats(const MultiStep& multi_step, const int64_t* tokens, int64_t rows, int64_t done) {
  bool any = false;
  for (int64_t row = 0; multi_step.repeat_length && row < rows; ++row) {
    if (!multi_step.texts[row]) continue;
    const int64_t length = multi_step.lengths[row] + done;
    multi_step.texts[row][length - 1] = uint32_t(tokens[row]);
    any = any || (length > multi_step.repeat_length && occurs_earlier(multi_step.texts[row], length, multi_step.repeat_length));
  }
  return any;
}

}  // namespace

int64_t Program::run(Call call, const MultiStep& multi_step, DraftStopRule* stop_rule) {
  const int64_t rows = call.batch.rows;
  std::vector<int64_t> positions(call.batch.positions, call.batch.positions + rows);
  std::vector<int64_t> start(call.batch.start, call.batch.start + rows);
  std::vector<int64_t> sample_positions(call.samples->positions, call.samples->positions + rows);
  const InterruptPoll interrupts(multi_step.interrupt_fds, multi_step.interrupt_fd_count);
  const size_t captured = size_t(call.captured_rows * call.feature_width) * (bfloat16_ ? sizeof(BF16) : sizeof(float));
  SampleCall samples = *call.samples;
  samples.positions = sample_positions.data();
  call.samples = &samples;
  call.batch.positions = positions.data();
  call.batch.start = start.data();
  for (int64_t done = 1;; ++done) {
    multi_step.narrow ? run_narrow(call) : run(call);
    if (done == multi_step.steps || any_ends(multi_step, samples.tokens, rows)) return done;
    if (repeats(multi_step, samples.tokens, rows, done) || interrupts.interrupted()) return done;
    if (stop_rule && !stop_rule->continues(samples)) return done;
    for (int64_t row = 0; row < rows; ++row) {
      ++positions[row];
      ++start[row];
      ++sample_positions[row];
    }
    call.batch.ids = samples.tokens;
    samples.tokens += rows;
    if (samples.probabilities) samples.probabilities += rows;
    call.features = static_cast<char*>(call.features) + captured;
  }
}

}  // namespace outrider
