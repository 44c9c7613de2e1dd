// A packed weight of a linear layer: a step reads it as one stream, each byte once for all rows.
//
// Outputs are grouped into panels of 32. Within a panel, k is the outer dimension:
//   float32   [K][32] float
//   bfloat16  [K/2][32][2] bf16                  one dot-product instruction takes two k of 16 outputs
//   int8      [K/4][32][4] uint8 (value + 128)   one takes four; 64 k form a group of the activations' scales
//   int4      [K/64] groups: [8][2][16][4] bytes; a byte of line i holds the four-k steps i (low half) and 8 + i (high
//             half) as value + 8. Then, for weights of value * scale + centre, [2][32] half-precision scales, of the first
//             and the last 32 k, and [2][16][2] bf16 centres, the two of an output adjacent
// Block formats (format.h; block_rows.h lays them out):
//   super-blocks, of one group where scales are half-precision numbers: the units of scales and of minima, [32] half
//             precision each, if there are units; then the groups of 64 k, and each is
//     values    of up to 6 bits: [8][32][4] bytes; a byte of line i holds the lower 4 bits of the four-k steps i (low half)
//               and 8 + i (high half). Upper bits: planes [B][2][32][4] bytes for B upper bits, of first and last 32 k; line
//               i has bits (4 + B i) mod 8 and up of plane B i / 8. 8 bits: [16][32][4]
//     scales    [parts][32]; part 2 r + h is of the four-k steps of run r (8 / runs lines) in half h
//     minima    the same, of affine formats
// float8: super-blocks of float32 units, [32], and groups of values, [32][32][2]: two k of an output are adjacent
// K is padded with zeros to the format's step, and the outputs to whole panels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "weights/format.h"
#include "memory.h"
#include "processor.h"
#include "simd.h"

namespace outrider {

constexpr int kInt4ScaleBytes = 2 * kPanel * (2 + 2);  // bytes of scales and centres of a group

// A view of a packed weight.
struct Weight {
  Format format;
  int64_t outputs, inputs;  // of the layer, without padding
  int64_t panels, k;        // padded
  int64_t panel_bytes;
  int64_t groups;  // of a super-block
  const char* data = nullptr;
  const float* scales = nullptr;  // int8: [panels * 32]

  // groups: of 64 k in a super-block; only formats with units have larger ones than 1
  Weight(Format format, int64_t outputs, int64_t inputs, int64_t groups = 1);
  const char* panel(int64_t index) const { return data + index * panel_bytes; }
};

// A packed weight with memory that may be written: its own, initially zeros, or what `place` gives it.
struct OwnWeight : Weight {
  Buffer memory, scale_memory;

  OwnWeight(Format format, int64_t outputs, int64_t inputs, int64_t groups = 1);
  // Without memory, for `allocate` or `place`.
  explicit OwnWeight(const Weight& shape) : Weight(shape) {}

  int64_t bytes() const { return panels * panel_bytes; }
  int64_t scale_bytes() const { return format == Format::kInt8 ? panels * kPanel * 4 : 0; }
  void allocate();
  void place(Buffer numbers, Buffer scales);
};

inline int64_t k_step(Format format, int64_t groups = 1) {
  switch (format) {
    case Format::kFloat32: return 1;
    case Format::kBFloat16: return kGroup / 2;  // a chunk of an operand
    default: return kGroup * groups;
  }
}

inline int64_t bytes_of_panel(Format format, int64_t k, int64_t groups = 1) {
  switch (format) {
    case Format::kFloat32: return k * kPanel * 4;
    case Format::kBFloat16: return k * kPanel * 2;
    case Format::kInt8: return k * kPanel;
    case Format::kInt4: return k / kGroup * (kGroup * kPanel / 2 + kInt4ScaleBytes);
    default: break;
  }
  const BlockFormat block = block_format(format);
  return k / kGroup * block.group_bytes() + k / kGroup / groups * block.unit_bytes();
}

inline Weight::Weight(Format format, int64_t outputs, int64_t inputs, int64_t groups)
    : format(format),
      outputs(outputs),
      inputs(inputs),
      panels((outputs + kPanel - 1) / kPanel),
      k(round_up(inputs, k_step(format, groups))),
      panel_bytes(bytes_of_panel(format, k, groups)),
      groups(groups) {}

inline OwnWeight::OwnWeight(Format format, int64_t outputs, int64_t inputs, int64_t groups)
    : Weight(format, outputs, inputs, groups) {
  allocate();
}

inline void OwnWeight::allocate() {
  place(Buffer::beside_others(bytes()), Buffer(scale_bytes()));
  std::memset(memory.as<char>(), 0, bytes());  // padding must be finite
  std::memset(scale_memory.as<char>(), 0, scale_bytes());
}

inline void OwnWeight::place(Buffer numbers, Buffer scales_of_them) {
  memory = std::move(numbers);
  scale_memory = std::move(scales_of_them);
  data = memory.as<char>();
  scales = scale_memory.as<float>();
}

// Address of output n's numbers of the first k step, `bytes` each; the next k step follows after 128 bytes.
inline char* output_address(OwnWeight& weight, int64_t n, int64_t bytes) {
  return weight.memory.as<char>() + n / kPanel * weight.panel_bytes + n % kPanel * bytes;
}

// Lay out one output of float32 or bfloat16 bits. source: [inputs]
template <class T>
void pack_plain(OwnWeight& weight, int64_t n, const T* source) {
  constexpr int64_t step = 4 / sizeof(T);
  char* to = output_address(weight, n, 4);
  for (int64_t k = 0; k < weight.inputs; k += step, to += 128) {
    std::memcpy(to, source + k, std::min<int64_t>(step, weight.inputs - k) * sizeof(T));
  }
}

// Lay out one output of int8 values (-127..127). values: [inputs]
inline void pack_int8(OwnWeight& weight, int64_t n, const int8_t* values, float scale) {
  char* to = output_address(weight, n, 4);
  for (int64_t k = 0; k < weight.inputs; k += 4, to += 128) {
    for (int64_t i = 0; i < std::min<int64_t>(4, weight.inputs - k); ++i) to[i] = char(values[k + i] + 128);
  }
  weight.scale_memory.as<float>()[n] = scale;
}

// Rounds a finite number to nearest, ties to even.
inline uint16_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Lay out one output of int4 values (-8..7). values: [inputs]; scales, centres: [K/32]
inline void pack_int4(OwnWeight& weight, int64_t n, const int8_t* values, const float* scales, const float* centres) {
  auto value = [&](int64_t k) { return k < weight.inputs ? values[k] + 8 : 8; };
  char* to = output_address(weight, n, 4);
  for (int64_t group = 0; group < weight.k / kGroup; ++group) {
    const int64_t half = kGroup / 2, begin = group * kGroup;
    for (int64_t k = begin; k < begin + half; k += 4, to += 128) {
      for (int64_t i = 0; i < 4; ++i) to[i] = char(value(k + i) | value(k + half + i) << 4);
    }
    for (int64_t i = 0; i < 2; ++i) {
      const uint16_t scale = half_bits(scales[2 * group + i]);
      std::memcpy(to + i * kPanel * 2 - n % kPanel * 2, &scale, sizeof scale);  // 2 bytes an output, not 4
      const uint16_t centre = bfloat16_bits(centres[2 * group + i]);
      std::memcpy(to + 2 * kPanel * 2 + i * 2, &centre, sizeof centre);
    }
    to += kInt4ScaleBytes;
  }
}

}  // namespace outrider
