// Outputs of block formats (format.h), packed into a weight and read back from it.
#pragma once

#include <algorithm>
#include <cstring>

#include "weights/weight.h"

namespace outrider {

// One output as checkpoints hold it, its blocks in order. Numbers of formats with units are bytes, others half precision.
struct BlockRow {
  const uint8_t* values = nullptr;  // [k], unsigned
  const uint8_t* scales = nullptr;  // [k / block] bytes, signed ones of symmetric formats, or numbers of two bytes
  const uint8_t* minima = nullptr;  // the same, of affine formats
  const uint8_t* scale_units = nullptr;    // [super-blocks] of two bytes, of floats four
  const uint8_t* minimum_units = nullptr;  // the same, of affine formats
};

// Where a group of 64 k lies in a panel.
inline int64_t group_offset(const Weight& weight, int64_t group) {
  const BlockFormat format = block_format(weight.format);
  return group * format.group_bytes() + (group / weight.groups + 1) * format.unit_bytes();
}
// The same of the units of the group's super-block.
inline int64_t unit_offset(const Weight& weight, int64_t group) {
  const int64_t first = group / weight.groups * weight.groups;
  return group_offset(weight, first) - block_format(weight.format).unit_bytes();
}

// A part's block among those of its group in order: parts alternate between the halves of a group.
constexpr int64_t block_of_part(const BlockFormat& format, int64_t part) { return part % 2 * (format.parts() / 2) + part / 2; }

// Bit of the upper bits' plane at which those of a line begin, and the plane.
constexpr int upper_position(const BlockFormat& format, int64_t line) { return int(4 + format.upper_bits() * line) % 8; }
constexpr int64_t upper_plane(const BlockFormat& format, int64_t line) { return format.upper_bits() * line / 8; }

// Address of an output's four bytes in a line of a half in a plane of upper bits.
constexpr int64_t upper_offset(const BlockFormat& format, int64_t line, int64_t half) {
  return 8 * 128 + upper_plane(format, line) * 256 + half * 128;
}

// values: [64]; to: the output's bytes of the group's first line
inline void pack_values(const BlockFormat& format, const uint8_t* values, char* to) {
  if (format.bits == 8) {
    for (int64_t line = 0; line < kGroup / 4; ++line) std::memcpy(to + line * 128, values + 4 * line, 4);
    return;
  }
  const uint32_t upper_ones = 0x01010101u * ((1u << format.upper_bits()) - 1);
  for (int64_t line = 0; line < kGroup / 8; ++line) {
    uint32_t four[2];
    std::memcpy(four, values + 4 * line, 4);
    std::memcpy(four + 1, values + 4 * line + kGroup / 2, 4);
    const uint32_t lower = (four[0] & 0x0F0F0F0Fu) | (four[1] & 0x0F0F0F0Fu) << 4;
    std::memcpy(to + line * 128, &lower, 4);
    for (int64_t half = 0; half < 2 && format.upper_bits(); ++half) {
      char* at = to + upper_offset(format, line, half);
      uint32_t plane;
      std::memcpy(&plane, at, 4);
      const int position = upper_position(format, line);
      plane = (plane & ~(upper_ones << position)) | (four[half] >> 4 & upper_ones) << position;
      std::memcpy(at, &plane, 4);
    }
  }
}

// The same of floats. to: the output's bytes of the group's first line
inline void pack_floats(const uint8_t* values, char* to) {
  for (int64_t k = 0; k < kGroup; k += 2) std::memcpy(to + k * kPanel, values + k, 2);
}

// Lay out one output.
inline void pack_blocks(OwnWeight& weight, int64_t n, const BlockRow& row) {
  const BlockFormat format = block_format(weight.format);
  const int64_t width = format.number_width(), unit = format.unit_width(), lane = n % kPanel;
  char* panel = weight.memory.as<char>() + n / kPanel * weight.panel_bytes;
  for (int64_t group = 0; group < weight.k / kGroup; ++group) {
    char* to = panel + group_offset(weight, group);
    if (format.floating) pack_floats(row.values + group * kGroup, to + lane * 2);
    else pack_values(format, row.values + group * kGroup, to + lane * 4);
    to += format.value_bytes();
    for (int64_t part = 0; width && part < format.parts(); ++part) {
      const int64_t from = (group * format.parts() + block_of_part(format, part)) * width;
      char* at = to + (part * kPanel + lane) * width;
      std::memcpy(at, row.scales + from, width);
      if (format.affine()) std::memcpy(at + format.scale_bytes(), row.minima + from, width);
    }
    if (!format.units || group % weight.groups) continue;
    char* units = panel + unit_offset(weight, group) + lane * unit;
    std::memcpy(units, row.scale_units + group / weight.groups * unit, unit);
    if (format.affine()) std::memcpy(units + kPanel * unit, row.minimum_units + group / weight.groups * unit, unit);
  }
}

inline float half_at(const char* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return number_of_half(bits);
}

// Value of an output in a group. from: the output's bytes of the group's first line
inline int value_in_group(const BlockFormat& format, const char* from, int64_t k) {
  const int64_t half = k / (kGroup / 2), line = k % (kGroup / 2) / 4;
  if (format.bits == 8) return uint8_t(from[k / 4 * 128 + k % 4]);
  const int lower = uint8_t(from[line * 128 + k % 4]) >> (half ? 4 : 0) & 15;
  if (!format.upper_bits()) return lower;
  const int plane = uint8_t(from[upper_offset(format, line, half) + k % 4]);
  return lower | (plane >> upper_position(format, line) & ((1 << format.upper_bits()) - 1)) << 4;
}

// One output of a block format as float32: the checkpoint's own numbers, bit for bit. to: [inputs]
inline void dequantize_blocks(const Weight& weight, int64_t n, float* to) {
  const BlockFormat format = block_format(weight.format);
  const int64_t lane = n % kPanel;
  const char* panel = weight.panel(n / kPanel);
  // The number of a block, of which `unit` is the half-precision number of its super-block.
  auto number = [&](const char* from, float unit) {
    if (!format.units) return half_at(from + lane * 2);
    return unit * float(format.affine() ? int(uint8_t(from[lane])) : int(int8_t(from[lane])));
  };
  for (int64_t group = 0; group < weight.k / kGroup; ++group) {
    const char* from = panel + group_offset(weight, group);
    const char* units = panel + unit_offset(weight, group) + lane * 2;
    const float scale_unit = format.units ? half_at(units) : 1.0f;
    const float minimum_unit = format.units && format.affine() ? half_at(units + kPanel * 2) : 1.0f;
    for (int64_t part = 0; part < format.parts(); ++part) {
      const char* scales = from + format.value_bytes() + part * kPanel * (format.units ? 1 : 2);
      const float scale = number(scales, scale_unit);
      const float minimum = format.affine() ? number(scales + format.scale_bytes(), minimum_unit) : 0.0f;
      const int64_t begin = block_of_part(format, part) * format.block;
      const int64_t end = std::min<int64_t>(begin + format.block, weight.inputs - group * kGroup);
      for (int64_t k = begin; k < end; ++k) {
        const float product = scale * float(value_in_group(format, from + lane * 4, k) - format.zero);
        to[group * kGroup + k] = format.affine() ? product + minimum : product;
      }
    }
  }
}

// A float of 8 bits, E4M3: a half-precision number with another bias.
inline float number_of_e4m3(uint8_t bits) { return number_of_half(uint16_t((bits & 0x7F) << 7 | (bits & 0x80) << 8)) * 256.0f; }

// The same of floats.
inline void dequantize_floats(const Weight& weight, int64_t n, float* to) {
  const int64_t lane = n % kPanel;
  const char* panel = weight.panel(n / kPanel);
  for (int64_t k = 0; k < weight.inputs; ++k) {
    const char* from = panel + group_offset(weight, k / kGroup);
    float unit;
    std::memcpy(&unit, panel + unit_offset(weight, k / kGroup) + lane * 4, 4);
    to[k] = number_of_e4m3(uint8_t(from[k % kGroup / 2 * 2 * kPanel + lane * 2 + k % 2])) * unit;
  }
}

// One output of int8 or int4 as float32. to: [inputs]
inline void dequantize_narrow(const Weight& weight, int64_t n, float* to) {
  const int64_t lane = n % kPanel;
  const char* panel = weight.panel(n / kPanel);
  for (int64_t k = 0; k < weight.inputs; ++k) {
    if (weight.format == Format::kInt8) {
      to[k] = float(int(uint8_t(panel[k / 4 * 128 + lane * 4 + k % 4])) - 128) * weight.scales[n];
      continue;
    }
    const char* from = panel + k / kGroup * bytes_of_panel(Format::kInt4, kGroup);
    const int64_t half = k % kGroup / (kGroup / 2), line = k % (kGroup / 2) / 4;
    const int value = (uint8_t(from[line * 128 + lane * 4 + k % 4]) >> (half ? 4 : 0) & 15) - 8;
    const char* scales = from + kGroup * kPanel / 2;
    uint16_t centre;
    std::memcpy(&centre, scales + 2 * kPanel * 2 + lane * 4 + half * 2, 2);
    const uint32_t bits = uint32_t(centre) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    to[k] = float(value) * half_at(scales + (half * kPanel + lane) * 2) + wide;
  }
}

// One output of any format as float32. to: [inputs]
inline void dequantize_output(const Weight& weight, int64_t n, float* to) {
  if (weight.format == Format::kFloat8) return dequantize_floats(weight, n, to);
  if (is_block(weight.format)) return dequantize_blocks(weight, n, to);
  if (weight.format == Format::kInt8 || weight.format == Format::kInt4) return dequantize_narrow(weight, n, to);
  const char* from = weight.panel(n / kPanel) + n % kPanel * 4;
  for (int64_t k = 0; k < weight.inputs; ++k) {
    if (weight.format == Format::kFloat32) {
      std::memcpy(to + k, from + k * 128, 4);
      continue;
    }
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 2, from + k / 2 * 128 + k % 2 * 2, 2);
    std::memcpy(to + k, &bits, 4);
  }
}

}  // namespace outrider
