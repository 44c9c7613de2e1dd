// FP8 numbers of a KV cache, in the formats of PyTorch's float8_e4m3fn and float8_e5m2.
//
// Storing rounds to nearest, ties to even, and saturates; NaN stays NaN. bfloat16 and float32 represent every number of both
// formats, so loading is exact.
#pragma once

#include "simd.h"

namespace outrider {

struct E4M3 {
  uint8_t bits;
  static constexpr int kFraction = 3, kBias = 7;
  static constexpr float kMaxFinite = 448.0f, kMinNormal = 0x1p-6f, kSteps = 0x1p9f;  // steps of subnormals in 1
};

struct E5M2 {
  uint8_t bits;
  static constexpr int kFraction = 2, kBias = 15;
  static constexpr float kMaxFinite = 57344.0f, kMinNormal = 0x1p-14f, kSteps = 0x1p16f;
};

inline Floats load(const E5M2* from, Mask mask) {  // the upper half of a half-precision number
  return from_halves(shift_left<8>(load_shorts(from, mask)));
}
inline Floats load(const E4M3* from, Mask mask) {  // half precision with another bias
  const Shorts bits = load_shorts(from, mask);
  const Shorts rest = bit_and(bits, shorts(0x7F));
  const Shorts sign = shift_left<8>(bit_and(bits, shorts(0x80)));
  const Shorts half = select_equal(rest, shorts(0x7F), shorts(0x7E00), shift_left<7>(rest));
  return mul(from_halves(bit_or(half, sign)), floats(256.0f));
}

template <class E>
void store_fp8(E* to, Floats value, Mask mask) {
  constexpr int kShift = 23 - E::kFraction;
  const Ints bits = as_ints(value);
  const Floats size = min(floats(E::kMaxFinite), abs(value));  // this argument order keeps NaN
  const Ints wide = as_ints(size);
  const Ints odd = bit_and(shift_right<kShift>(wide), ints(1));
  const Ints half = add(odd, ints((1 << (kShift - 1)) - 1));
  Ints code = sub(shift_right<kShift>(add(wide, half)), ints((127 - E::kBias) << E::kFraction));
  const Mask small = less(size, floats(E::kMinNormal));
  code = select(small, rounded(mul(size, floats(E::kSteps))), code);
  code = select(unordered(value, value), ints(0x7F), code);
  const Ints sign = bit_and(shift_right<24>(bits), ints(0x80));
  store_bytes(to, bit_or(code, sign), mask);
}
inline void store(E4M3* to, Floats value, Mask mask) { store_fp8(to, value, mask); }
inline void store(E5M2* to, Floats value, Mask mask) { store_fp8(to, value, mask); }

enum class PoolFormat : int32_t { kFloat32 = 0, kBFloat16 = 1, kE4M3 = 2, kE5M2 = 3 };

}  // namespace outrider
