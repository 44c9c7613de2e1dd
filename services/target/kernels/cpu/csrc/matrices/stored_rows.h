// Rows of weights as checkpoints store them, packed without loss into the block format that holds their numbers.
//
// A GGUF row is a sequence of blocks of 32 weights, or of 256 with eight or sixteen blocks inside (the K types). ggml's names of
// fields: d, dmin, m, qs, qh, ql. All numbers are little-endian.
#pragma once

#include <cstring>
#include <vector>

#include "weights/block_rows.h"
#include "parallel.h"

namespace outrider {

// Room for one row, padded to whole super-blocks; the padding stays zero.
class StoredRow {
 public:
  explicit StoredRow(const Weight& weight) : format_(block_format(weight.format)) {
    const int64_t width = format_.number_width(), blocks = weight.k / format_.block;
    values_.resize(weight.k);
    scales_.resize(blocks * width);
    minima_.resize(format_.affine() ? blocks * width : 0);
    const int64_t units = format_.units ? weight.k / kGroup / weight.groups * format_.unit_width() : 0;
    scale_units_.resize(units);
    minimum_units_.resize(format_.affine() ? units : 0);
  }

  // from: a row of a GGUF tensor, of the type that the weight's format is for
  void decode_gguf(Format format, int64_t inputs, const uint8_t* from) {
    uint8_t* values = values_.data();
    if (format_.units) {
      for (int64_t i = 0; i < inputs / 256; ++i, values += 256) {
        from += format == Format::kK6 ? decode_k6(i, from, values) : decode_k45(i, from, values);
      }
      return;
    }
    for (int64_t i = 0; i < inputs / 32; ++i, values += 32) from += decode_block(i, from, values);
  }

  // Copies a row of separate arrays, each without padding.
  void copy(int64_t inputs, const BlockRow& from) {
    auto take = [](std::vector<uint8_t>& to, const uint8_t* numbers, int64_t bytes) {
      if (bytes) std::memcpy(to.data(), numbers, bytes);
    };
    const int64_t width = format_.number_width(), blocks = (inputs + format_.block - 1) / format_.block;
    take(values_, from.values, inputs);
    take(scales_, from.scales, blocks * width);
    take(minima_, from.minima, minima_.empty() ? 0 : blocks * width);
    take(scale_units_, from.scale_units, int64_t(scale_units_.size()));
    take(minimum_units_, from.minimum_units, int64_t(minimum_units_.size()));
  }

  BlockRow view() const {
    return {values_.data(), scales_.data(), minima_.data(), scale_units_.data(), minimum_units_.data()};
  }

 private:
  // Q4_0, Q5_0: d; Q4_1, Q5_1: d, m. Then qh, the fifth bits, and qs, the others: weights 0-15 in low halves, 16-31 in high
  // ones. Q8_0: d and signed bytes. Returns the block's bytes.
  int64_t decode_block(int64_t i, const uint8_t* from, uint8_t* values) {
    const uint8_t* start = from;
    std::memcpy(&scales_[2 * i], from, 2);
    from += 2;
    if (format_.bits == 8) {
      for (int j = 0; j < 32; ++j) values[j] = uint8_t(from[j] + 128);
      return 34;
    }
    if (format_.affine()) {
      std::memcpy(&minima_[2 * i], from, 2);
      from += 2;
    }
    uint32_t fifth = 0;
    if (format_.bits == 5) {
      std::memcpy(&fifth, from, 4);
      from += 4;
    }
    for (int j = 0; j < 16; ++j) {
      values[j] = uint8_t((from[j] & 15) | (fifth >> j & 1) << 4);
      values[j + 16] = uint8_t(from[j] >> 4 | (fifth >> (j + 16) & 1) << 4);
    }
    return from + 16 - start;
  }

  // Q4_K: d, dmin, scales[12], qs[128]; Q5_K: qh[32] before qs. Weights are d * scale * q - dmin * minimum.
  int64_t decode_k45(int64_t i, const uint8_t* from, uint8_t* values) {
    std::memcpy(&scale_units_[2 * i], from, 2);
    std::memcpy(&minimum_units_[2 * i], from + 2, 2);
    minimum_units_[2 * i + 1] ^= 0x80;  // added, not subtracted
    const uint8_t* packed = from + 4;
    for (int j = 0; j < 4; ++j) {  // 6 bits each, the upper two of the last four in spare bits of the first four
      scales_[8 * i + j] = packed[j] & 63;
      minima_[8 * i + j] = packed[4 + j] & 63;
      scales_[8 * i + 4 + j] = uint8_t((packed[8 + j] & 15) | packed[j] >> 6 << 4);
      minima_[8 * i + 4 + j] = uint8_t(packed[8 + j] >> 4 | packed[4 + j] >> 6 << 4);
    }
    const bool five = format_.bits == 5;
    const uint8_t *fifth = from + 16, *four = from + 16 + (five ? 32 : 0);
    for (int pair = 0; pair < 4; ++pair, four += 32, values += 64) {
      for (int j = 0; j < 32; ++j) {
        values[j] = four[j] & 15;
        values[j + 32] = four[j] >> 4;
      }
      for (int j = 0; five && j < 32; ++j) {
        values[j] |= uint8_t((fifth[j] >> (2 * pair) & 1) << 4);
        values[j + 32] |= uint8_t((fifth[j] >> (2 * pair + 1) & 1) << 4);
      }
    }
    return five ? 176 : 144;
  }

  // Q6_K: ql[128], qh[64], signed scales[16], d. Each half of the weights: four times 32.
  int64_t decode_k6(int64_t i, const uint8_t* from, uint8_t* values) {
    for (int half = 0; half < 2; ++half, values += 128) {
      const uint8_t *four = from + 64 * half, *upper = from + 128 + 32 * half;
      for (int j = 0; j < 32; ++j) {
        values[j] = uint8_t((four[j] & 15) | (upper[j] & 3) << 4);
        values[j + 32] = uint8_t((four[j + 32] & 15) | (upper[j] >> 2 & 3) << 4);
        values[j + 64] = uint8_t(four[j] >> 4 | (upper[j] >> 4 & 3) << 4);
        values[j + 96] = uint8_t(four[j + 32] >> 4 | upper[j] >> 6 << 4);
      }
    }
    std::memcpy(&scales_[16 * i], from + 192, 16);
    std::memcpy(&scale_units_[2 * i], from + 208, 2);
    return 210;
  }

  const BlockFormat format_;
  std::vector<uint8_t> values_, scales_, minima_, scale_units_, minimum_units_;
};

// Rows of a GGUF tensor, of `row_bytes` each. outputs: [count], their indices
inline void pack_gguf(OwnWeight& weight, const uint8_t* rows, int64_t row_bytes, const int64_t* outputs, int64_t count,
                      int32_t threads) {
  in_parts(count, threads, [&](int64_t first, int64_t part) {
    StoredRow row(weight);
    for (int64_t i = first; i < first + part; ++i) {
      row.decode_gguf(weight.format, weight.inputs, rows + i * row_bytes);
      pack_blocks(weight, outputs[i], row.view());
    }
  });
}

// Rows as separate arrays, of blocks in order: values [count, inputs], scales and minima [count, blocks], units [count,
// super-blocks].
inline void pack_arrays(OwnWeight& weight, const BlockRow& rows, const int64_t* outputs, int64_t count, int32_t threads) {
  const BlockFormat format = block_format(weight.format);
  const int64_t blocks = (weight.inputs + format.block - 1) / format.block * format.number_width();
  const int64_t units = weight.k / kGroup / weight.groups * format.unit_width();
  auto at = [](const uint8_t* from, int64_t offset) { return from ? from + offset : nullptr; };
  in_parts(count, threads, [&](int64_t first, int64_t part) {
    StoredRow row(weight);
    for (int64_t i = first; i < first + part; ++i) {
      row.copy(weight.inputs, {rows.values + i * weight.inputs, at(rows.scales, i * blocks), at(rows.minima, i * blocks),
                               at(rows.scale_units, i * units), at(rows.minimum_units, i * units)});
      pack_blocks(weight, outputs[i], row.view());
    }
  });
}

}  // namespace outrider
