// What products with panels of 8-bit floats (E4M3) share between instruction sets.
//
// Registers hold the numbers times 2^-8, which bfloat16 and half precision represent, subnormal ones included. Rows stay floats,
// as for bfloat16 weights. What a super-block comes to is summed in float32, and then meets its units.
#pragma once

#include "products/panel_pass.h"
#include "weights/block_rows.h"

namespace outrider {

constexpr float kFloat8Scale = 256.0f;  // of numbers in registers
constexpr int64_t kFloat8Lines = kGroup * kPanel / 128;  // of 128 bytes, of a group: four k each

// Where a panel's group of 64 k is. line: 128 bytes each, from the panel's first one. fresh: a super-block begins
struct Float8Group {
  const char* values;
  int64_t index, line;
  bool fresh;
};

// Rows first .. end - 1 of a tile += what a super-block comes to, times its units. tile, sums: [rows, 32]
[[gnu::always_inline]] inline void add_super_block(float* tile, const char* units, const float* sums, int64_t first,
                                                   int64_t end) {
  const float* scales = reinterpret_cast<const float*>(units);
  const Floats low = mul(load(scales), floats(kFloat8Scale)), high = mul(load(scales + kLanes), floats(kFloat8Scale));
  float* to = tile + first * kPanel;
  sums += first * kPanel;
#pragma GCC unroll 4
  for (int64_t m = first; m < end; ++m, to += kPanel, sums += kPanel) {
    store(to, fmadd(load(sums), low, load(to)));
    store(to + kLanes, fmadd(load(sums + kLanes), high, load(to + kLanes)));
  }
}

// Multiplies a panel with M rows. function(group, sums) adds a group's products to the sums, [M, 32], which it sets if fresh.
template <int M, class Function>
[[gnu::always_inline]] inline void each_float8_group(const Pass& pass, Function&& function) {
  alignas(64) float sums[M * kPanel];
  std::memset(pass.tile, 0, M * kPanel * sizeof(float));
  const int64_t groups = pass.weight.k / kGroup;
  for (int64_t index = 0; index < groups;) {
    const char* units = pass.begin() + unit_offset(pass.weight, index);
    pass.fetch((units - pass.begin()) / 128);
    for (int64_t i = 0; i < pass.weight.groups; ++i, ++index) {
      const char* values = units + kPanel * 4 + i * kGroup * kPanel;
      function(Float8Group{values, index, (values - pass.begin()) / 128, i == 0}, sums);
    }
    add_super_block(pass.tile, units, sums, 0, M);
  }
}

}  // namespace outrider
