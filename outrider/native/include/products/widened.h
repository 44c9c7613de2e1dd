// Products of many rows with a panel of 8-bit floats: the first pass leaves the panel in bfloat16, and all passes read that.
//
// To the same bits as passes that widen numbers as they multiply them (float8_pass.h).
#pragma once

#include "float8_lines.h"
#include "products/float8_pass.h"

namespace outrider {

// A thread's room for widened numbers.
inline char* wide_room(int64_t bytes) {
  static thread_local Buffer memory;
  if (memory.bytes() < size_t(bytes)) memory = Buffer(size_t(bytes));
  return memory.as<char>();
}

// The super-block `index` of a pass's panel: its units, and its values behind them, whose first line of 128 bytes is `line`.
struct SuperBlock {
  const char *units, *values;
  int64_t line;

  SuperBlock(const Pass& pass, int64_t index)
      : units(pass.begin() + unit_offset(pass.weight, index * pass.weight.groups)),
        values(units + block_format(Format::kFloat8).unit_bytes()),
        line((values - pass.begin()) / 128) {}
};

// kernel: multiplies `rows` rows with a panel of bfloat16
inline void multiply_widened(const Pass& pass, int64_t rows, void (*kernel)(const Pass&)) {
  alignas(64) float sums[kDotRows * kPanel];
  Weight block(Format::kBFloat16, kPanel, pass.weight.groups * kGroup);
  const int64_t count = pass.weight.k / block.k, lines = block.k * kPanel / 128;
  const int64_t step = chunks_of(block) * pass.x.rows * bytes_of_chunk(Format::kBFloat16);
  char* room = wide_room(count * block.panel_bytes);
  const Float8Lines widened;
  Operand x = pass.x;
  std::memset(pass.tile, 0, rows * kPanel * sizeof(float));
  for (int64_t i = 0; i < count; ++i, room += block.panel_bytes, x.data += step) {
    const SuperBlock from(pass, i);
    for (int64_t line = 0; pass.row == 0 && line < lines; ++line) {
      if (pass.streams) pass.fetch(from.line + line);
      widened.widen(from.values + line * 128, room + line * 256);
    }
    block.data = room;
    // Half as far a line, because its numbers take twice the bytes here.
    const char* ahead = pass.streams ? from.units : pass.ahead + 2 * from.line * pass.ahead_step;
    kernel(Pass{block, 0, x, pass.row, ahead, pass.streams ? 0 : pass.ahead_step / 2, false, sums});
    add_super_block(pass.tile, from.units, sums, 0, rows);
  }
}

}  // namespace outrider
