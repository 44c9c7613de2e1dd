// Plain steps of the same sessions, one behind the other.
#include "program.h"

#include <algorithm>

namespace outrider {

bool ends(const Burst& burst, const int64_t* tokens, int64_t rows) {
  const int64_t* stop = burst.stops;
  for (int64_t row = 0; row < rows; stop += burst.stop_counts[row++]) {
    const int64_t* end = stop + burst.stop_counts[row];
    if (tokens[row] < 0 || std::find(stop, end, tokens[row]) != end) return true;
  }
  return false;
}

bool stood_before(const uint32_t* text, int64_t length, int64_t same) {
  const uint32_t* last = text + length - 1;
  const Ints wanted = ints(int32_t(*last));
  for (int64_t place = same - 1; place < length - 1; place += kLanes) {
    const Mask there = lanes(length - 1 - place);
    Mask found = Mask(there & equal(load_ints(text + place, there), wanted));
    for (; found; found = Mask(found & (found - 1))) {
      const uint32_t* other = text + place + __builtin_ctz(found);
      if (std::equal(last - (same - 1), last, other - (same - 1))) return true;
    }
  }
  return false;
}

namespace {

// Puts what a step drew, the `done`-th of the burst, behind the texts. Returns whether one of them repeats.
bool repeats(const Burst& burst, const int64_t* tokens, int64_t rows, int64_t done) {
  bool any = false;
  for (int64_t row = 0; burst.same && row < rows; ++row) {
    const int64_t length = burst.lengths[row] + done;
    burst.texts[row][length - 1] = uint32_t(tokens[row]);
    any = any || (length > burst.same && stood_before(burst.texts[row], length, burst.same));
  }
  return any;
}

}  // namespace

int64_t Program::run(Call call, const Burst& burst, Confidence* confidence) {
  const int64_t rows = call.batch.rows;
  std::vector<int64_t> positions(call.batch.positions, call.batch.positions + rows);
  std::vector<int64_t> start(call.batch.start, call.batch.start + rows);
  std::vector<int64_t> drawn(call.draws->positions, call.draws->positions + rows);
  const Listener listener(burst.files, burst.file_count);
  const size_t captured = size_t(call.captured_rows * call.feature_width) * (bfloat16_ ? sizeof(BF16) : sizeof(float));
  DrawCall draws = *call.draws;
  draws.positions = drawn.data();
  call.draws = &draws;
  call.batch.positions = positions.data();
  call.batch.start = start.data();
  for (int64_t done = 1;; ++done) {
    burst.narrow ? run_narrow(call) : run(call);
    if (done == burst.steps || ends(burst, draws.tokens, rows)) return done;
    if (repeats(burst, draws.tokens, rows, done) || listener.called()) return done;
    if (confidence && !confidence->goes_on(draws)) return done;
    for (int64_t row = 0; row < rows; ++row) {
      ++positions[row];
      ++start[row];
      ++drawn[row];
    }
    call.batch.ids = draws.tokens;
    draws.tokens += rows;
    if (draws.seconds) draws.seconds += rows, draws.odds += 2 * rows;
    call.features = static_cast<char*>(call.features) + captured;
  }
}

}  // namespace outrider
