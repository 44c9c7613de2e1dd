// A linear layer's weight, laid out once so that a step reads it as one stream, each byte for all rows together.
//
// Outputs come in panels of 32. Within a panel, k runs on:
//   float32   [K][32] float
//   bfloat16  [K/2][32][2] bf16                  one dot-product instruction takes two k of 16 outputs
//   int8      [K/4][32][4] uint8 (value + 128)   one takes four; 64 k form a group of the activations' scales
//   int4      [K/64] groups: [8][2][16][4] bytes, and then 32 half-precision scales; a byte holds the four-k steps 2i
//             (low half) and 2i + 1 (high half), as value + 8
// K is padded with zeros to the format's step, and the outputs to whole panels.
#pragma once

#include <immintrin.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace outrider {

enum class Format : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3 };

constexpr int kPanel = 32;
constexpr int kGroup = 64;

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Memory on huge pages where the system has them: a step walks through all weights, and would miss the TLB all along.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    const size_t step = bytes >= (size_t{2} << 20) ? size_t{2} << 20 : 64;
    data_ = std::aligned_alloc(step, round_up(bytes ? bytes : 1, step));
    if (data_ == nullptr) throw std::bad_alloc();
    if (step > 64) madvise(data_, round_up(bytes, step), MADV_HUGEPAGE);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() { std::free(data_); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

struct Weight {
  Format format;
  int64_t outputs, inputs;  // as the layer has them
  int64_t panels, k;        // padded
  int64_t panel_bytes;
  Buffer data;
  Buffer scales;  // int8: [panels * 32] float

  Weight(Format format, int64_t outputs, int64_t inputs);
  const char* panel(int64_t index) const { return data.as<char>() + index * panel_bytes; }
};

inline int64_t k_step(Format format) {
  switch (format) {
    case Format::kFloat32: return 1;
    case Format::kBFloat16: return 2;
    default: return kGroup;
  }
}

inline int64_t bytes_of_panel(Format format, int64_t k) {
  switch (format) {
    case Format::kFloat32: return k * kPanel * 4;
    case Format::kBFloat16: return k * kPanel * 2;
    case Format::kInt8: return k * kPanel;
    default: return k * kPanel / 2 + k / kGroup * kPanel * 2;
  }
}

inline Weight::Weight(Format format, int64_t outputs, int64_t inputs)
    : format(format),
      outputs(outputs),
      inputs(inputs),
      panels((outputs + kPanel - 1) / kPanel),
      k(round_up(inputs, k_step(format))),
      panel_bytes(bytes_of_panel(format, k)),
      data(panels * panel_bytes),
      scales(format == Format::kInt8 ? panels * kPanel * 4 : 0) {}

// Lay out float32 or bfloat16 bits. source: [outputs, inputs], row after row.
template <class T>
void pack_plain(Weight& weight, const T* source) {
  const int64_t step = k_step(weight.format);
  T* to = weight.data.as<T>();
  for (int64_t panel = 0; panel < weight.panels; ++panel) {
    for (int64_t k = 0; k < weight.k; k += step) {
      for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; ++n) {
        for (int64_t i = k; i < k + step; ++i) {
          *to++ = n < weight.outputs && i < weight.inputs ? source[n * weight.inputs + i] : T(0);
        }
      }
    }
  }
}

// Lay out int8 values (-127..127). values: [outputs, inputs]; scales: [outputs].
inline void pack_int8(Weight& weight, const int8_t* values, const float* scales) {
  uint8_t* to = weight.data.as<uint8_t>();
  for (int64_t panel = 0; panel < weight.panels; ++panel) {
    for (int64_t k = 0; k < weight.k; k += 4) {
      for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; ++n) {
        for (int64_t i = k; i < k + 4; ++i) {
          const bool inside = n < weight.outputs && i < weight.inputs;
          *to++ = uint8_t((inside ? values[n * weight.inputs + i] : 0) + 128);
        }
      }
    }
  }
  float* scale = weight.scales.as<float>();
  for (int64_t n = 0; n < weight.panels * kPanel; ++n) scale[n] = n < weight.outputs ? scales[n] : 0.0f;
}

// Lay out int4 values (-8..7). values: [outputs, inputs]; scales: [outputs, groups of 64].
inline void pack_int4(Weight& weight, const int8_t* values, const float* scales) {
  const int64_t groups = weight.k / kGroup;
  char* to = weight.data.as<char>();
  for (int64_t panel = 0; panel < weight.panels; ++panel) {
    for (int64_t group = 0; group < groups; ++group) {
      auto value = [&](int64_t n, int64_t k) {
        const bool inside = n < weight.outputs && k < weight.inputs;
        return uint8_t((inside ? values[n * weight.inputs + k] : 0) + 8);
      };
      for (int64_t pair = 0; pair < kGroup / 8; ++pair) {
        for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; ++n) {
          for (int64_t i = 0; i < 4; ++i) {
            const int64_t k = group * kGroup + pair * 8 + i;
            *to++ = char(value(n, k) | value(n, k + 4) << 4);
          }
        }
      }
      uint16_t scale[kPanel];
      for (int64_t i = 0; i < kPanel; ++i) {
        const int64_t n = panel * kPanel + i;
        scale[i] = _cvtss_sh(n < weight.outputs ? scales[n * groups + group] : 0.0f, _MM_FROUND_TO_NEAREST_INT);
      }
      std::memcpy(to, scale, sizeof scale);
      to += sizeof scale;
    }
  }
}

}  // namespace outrider
