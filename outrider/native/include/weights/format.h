// Number formats of weights.
//
// Block formats hold what checkpoints store in blocks of weights with scales of their own (GGUF, GPTQ, AWQ), number by number:
//
//   symmetric   w = scale * (value - zero)
//   affine      w = scale * value + minimum
//
// Values are unsigned. Scales and minima are half-precision numbers of a block (one of 32 inputs of an output), or, in the K
// formats, bytes in units of a half-precision number of a super-block. FP8 checkpoints have numbers of 8 bits, E4M3, in units
// of a super-block's float32 number, which may be a whole output.
#pragma once

#include <cstdint>

namespace outrider {

enum class Format : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kInt8 = 2,
  kInt4 = 3,
  kSymmetric4 = 4,  // GGUF: Q4_0
  kSymmetric5 = 5,  // Q5_0
  kSymmetric8 = 6,  // Q8_0
  kAffine4 = 7,     // Q4_1
  kAffine5 = 8,     // Q5_1
  kK4 = 9,          // Q4_K
  kK5 = 10,         // Q5_K
  kK6 = 11,         // Q6_K
  kFloat8 = 12,     // FP8: E4M3
};

constexpr int kPanel = 32;
constexpr int kGroup = 64;

struct BlockFormat {
  int bits = 0;        // of a value: 4, 5, 6 or 8
  int zero = 0;        // of symmetric formats; 0 for affine ones
  int block = 32;      // inputs that share a scale: 32, or 16
  bool units = false;  // scales and minima are bytes in units of a super-block's numbers; else half precision
  bool floating = false;  // values are floats in such units, without scales of blocks

  constexpr bool affine() const { return zero == 0 && !floating; }
  constexpr int parts() const { return kGroup / block; }            // blocks of a group
  constexpr int upper_bits() const { return bits < 8 ? bits - 4 : 0; }  // bits beside a byte's halves
  constexpr int kinds() const { return affine() ? 2 : 1; }          // of numbers of a block: scale, minimum
  constexpr int64_t number_width() const { return floating ? 0 : units ? 1 : 2; }  // bytes of a block's number
  constexpr int64_t unit_width() const { return floating ? 4 : 2; }                // of a super-block's

  // Bytes of 32 outputs.
  constexpr int64_t value_bytes() const { return int64_t(bits) * kGroup * kPanel / 8; }              // of a group
  constexpr int64_t scale_bytes() const { return parts() * kPanel * number_width(); }                // of a group, one kind
  constexpr int64_t group_bytes() const { return value_bytes() + kinds() * scale_bytes(); }
  constexpr int64_t unit_bytes() const { return units ? kinds() * kPanel * unit_width() : 0; }  // of a super-block
};

constexpr bool is_block(Format format) { return format >= Format::kSymmetric4; }
// Formats that are multiplied as floats, with rows that are not quantized.
constexpr bool is_floating(Format format) { return format <= Format::kBFloat16 || format == Format::kFloat8; }

constexpr BlockFormat block_format(Format format) {
  switch (format) {
    case Format::kSymmetric4: return {4, 8};
    case Format::kSymmetric5: return {5, 16};
    case Format::kSymmetric8: return {8, 128};
    case Format::kAffine4: return {4};
    case Format::kAffine5: return {5};
    case Format::kK4: return {4, 0, 32, true};
    case Format::kK5: return {5, 0, 32, true};
    case Format::kK6: return {6, 32, 16, true};
    case Format::kFloat8: return {8, 0, kGroup, true, true};
    default: return {};
  }
}

}  // namespace outrider
