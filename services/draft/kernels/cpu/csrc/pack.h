// Quantization of weights to int4 while they are packed.
#pragma once

#include <cmath>
#include <thread>
#include <vector>

#include "weights/weight.h"

namespace outrider {

constexpr int64_t kBlockInputs = 32;  // inputs of an output with a scale and a centre of their own

struct Int4Block {
  float scale, centre;
  int8_t values[kBlockInputs];  // -8 .. 7
};

// A block's values with `steps` quantization steps between its ends; more than 15 clip the ends. Returns the squared error.
inline float quantize_block(const float* from, float low, float high, int steps, Int4Block& to) {
  // What the packed weight will hold, so that the error is the one that products have.
  to.scale = number_of_half(half_bits((high - low) / float(steps)));
  const uint32_t bits = uint32_t{bfloat16_bits((low + high) / 2.0f + to.scale / 2.0f)} << 16;
  std::memcpy(&to.centre, &bits, sizeof bits);
  const float inverse = to.scale > 0.0f ? 1.0f / to.scale : 0.0f;
  float error = 0.0f;
  for (int64_t i = 0; i < kBlockInputs; ++i) {
    const float value = std::min(std::max(std::nearbyint((from[i] - to.centre) * inverse), -8.0f), 7.0f);
    to.values[i] = int8_t(value);
    const float off = value * to.scale + to.centre - from[i];
    error += off * off;
  }
  return error;
}

inline Int4Block best_block(const float* from) {
  const auto [low, high] = std::minmax_element(from, from + kBlockInputs);
  Int4Block best, other;
  float least = quantize_block(from, *low, *high, 15, best);
  for (int steps : {16, 17, 14}) {
    const float error = quantize_block(from, *low, *high, steps, other);
    if (error < least) least = error, best = other;
  }
  return best;
}

// source: [outputs, inputs] bfloat16. to: panels * panel_bytes of the weight's int4 form.
inline void pack_int4_weight(const uint16_t* source, int64_t outputs, int64_t inputs, char* to, int threads) {
  OwnWeight weight(Format::kInt4, outputs, inputs);
  const int64_t blocks = weight.k / kBlockInputs;
  auto part = [&](int64_t begin, int64_t end) {
    std::vector<float> row(weight.k, 0.0f), scales(blocks), centres(blocks);
    std::vector<int8_t> values(weight.k);
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t k = 0; k < inputs; ++k) {
        const uint32_t bits = uint32_t{source[n * inputs + k]} << 16;
        std::memcpy(&row[k], &bits, sizeof bits);
      }
      for (int64_t i = 0; i < blocks; ++i) {
        const Int4Block block = best_block(row.data() + i * kBlockInputs);
        scales[i] = block.scale, centres[i] = block.centre;
        std::copy(block.values, block.values + kBlockInputs, values.begin() + i * kBlockInputs);
      }
      pack_int4(weight, n, values.data(), scales.data(), centres.data());
    }
  };
  const int64_t each = round_up((outputs + threads - 1) / threads, kPanel);
  std::vector<std::thread> others;
  for (int64_t begin = each; begin < outputs; begin += each) {
    others.emplace_back(part, begin, std::min(begin + each, outputs));
  }
  part(0, std::min(each, outputs));
  for (std::thread& other : others) other.join();
  std::memcpy(to, weight.data, weight.panels * weight.panel_bytes);
}

}  // namespace outrider
