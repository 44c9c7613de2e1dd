// Quantizing rows of weights while they are packed. Plain twins: quantize_int8 and quantize_int4 in matrices/weights.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"
#include "weights/weight.h"

namespace outrider {

constexpr int kBlock = kGroup / 2;  // weights that share a scale and a centre, int4

// Room for one row of a weight, padded to whole groups.
struct QuantizedRow {
  std::vector<float> wide, scales, centres;
  std::vector<int8_t> values;

  explicit QuantizedRow(const Weight& weight)
      : wide(weight.k), scales(weight.k / kBlock), centres(weight.k / kBlock), values(weight.k) {}
};

// source: [inputs], float32 or bfloat16 bits. The padding of `to` stays zero.
inline void widen(const void* source, bool bfloat16, int64_t inputs, float* to) {
  if (!bfloat16) {
    std::memcpy(to, source, inputs * sizeof(float));
    return;
  }
  const uint16_t* bits = static_cast<const uint16_t*>(source);
  for (int64_t i = 0; i < inputs; ++i) {
    const uint32_t whole = uint32_t(bits[i]) << 16;
    std::memcpy(to + i, &whole, sizeof whole);
  }
}

// wide: [inputs]. Returns the row's scale.
inline float quantize_row_int8(const float* wide, int64_t inputs, int8_t* values) {
  float largest = 1e-30f;
  for (int64_t i = 0; i < inputs; ++i) largest = std::max(largest, std::fabs(wide[i]));
  const float scale = largest / 127.0f;
  for (int64_t i = 0; i < inputs; ++i) values[i] = int8_t(std::nearbyint(wide[i] / scale));
  return scale;
}

// Takes the candidate number of steps between the smallest and the largest weight that has the smallest error; stops at
// one whose error is no more than the rounding of bfloat16. wide: [32]
inline void quantize_block_int4(const float* wide, const int32_t* steps, int32_t candidates, int8_t* values,
                                float* scale, float* centre) {
  float least = wide[0], largest = wide[0];
  double squares = 0.0;
  for (int i = 0; i < kBlock; ++i) {
    least = std::min(least, wide[i]);
    largest = std::max(largest, wide[i]);
    squares += double(wide[i]) * wide[i];
  }
  double best = std::numeric_limits<double>::infinity();
  for (int32_t tried = 0; tried < candidates && best > squares * 0x1p-16; ++tried) {
    const float step = std::max((largest - least) / float(steps[tried]), 1e-7f);
    const float stored = number_of_half(half_bits(step));
    const float middle = steps[tried] > 15 ? (least + largest) / 2 : least + 7.5f * stored;
    const uint32_t bits = uint32_t(bfloat16_bits(middle + 0.5f * stored)) << 16;
    float around;
    std::memcpy(&around, &bits, sizeof around);
    float rounded[kBlock];
    double error = 0.0;
    for (int i = 0; i < kBlock; ++i) {
      rounded[i] = std::nearbyint(std::min(std::max((wide[i] - around) / stored, -8.0f), 7.0f));
    }
    for (int i = 0; i < kBlock; ++i) {
      const double off = double(rounded[i]) * stored + around - wide[i];
      error += off * off;
    }
    if (!(error < best)) continue;
    best = error, *scale = stored, *centre = around;
    for (int i = 0; i < kBlock; ++i) values[i] = int8_t(rounded[i]);
  }
}

// Quantize and lay out some outputs. source: [count, inputs]; outputs: [count], their indices; steps: int4's candidates
inline void quantize_rows(OwnWeight& weight, const char* source, bool bfloat16, const int64_t* outputs, int64_t count,
                          const int32_t* steps, int32_t candidates) {
  QuantizedRow row(weight);
  const int64_t bytes = weight.inputs * (bfloat16 ? 2 : 4);
  for (int64_t i = 0; i < count; ++i) {
    widen(source + i * bytes, bfloat16, weight.inputs, row.wide.data());
    if (weight.format == Format::kInt8) {
      const float scale = quantize_row_int8(row.wide.data(), weight.inputs, row.values.data());
      pack_int8(weight, outputs[i], row.values.data(), scale);
      continue;
    }
    for (int64_t block = 0; block < weight.k / kBlock; ++block) {
      quantize_block_int4(row.wide.data() + block * kBlock, steps, candidates, row.values.data() + block * kBlock,
                          &row.scales[block], &row.centres[block]);
    }
    pack_int4(weight, outputs[i], row.values.data(), row.scales.data(), row.centres.data());
  }
}

// The same by several threads.
inline void quantize_in_parallel(OwnWeight& weight, const char* source, bool bfloat16, const int64_t* outputs,
                                 int64_t count, const int32_t* steps, int32_t candidates, int32_t threads) {
  const int64_t bytes = weight.inputs * (bfloat16 ? 2 : 4);
  in_parts(count, threads, [&](int64_t first, int64_t rows) {
    quantize_rows(weight, source + first * bytes, bfloat16, outputs + first, rows, steps, candidates);
  });
}

}  // namespace outrider
