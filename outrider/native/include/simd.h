// Functions of vectors (lanes.h). All are deterministic: a lane's result depends on that lane alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace outrider {

inline Mask lanes(int64_t count) {
  return count >= kLanes ? Mask(0xFFFF) : count <= 0 ? Mask(0) : Mask((1u << count) - 1);
}

// first, first + 1, ..., first + 15.
inline Ints ids_from(int64_t first) { return add(ints(int(first)), first_ints()); }

// e^x with an error below 2 units in the last place; 0 below -87.3, at most e^88.
inline Floats exp(Floats x) {
  x = min(x, floats(88.0f));
  const Mask tiny = less(x, floats(-87.3f));
  const Floats n = round_to_integer(mul(x, floats(1.44269504088896341f)));
  Floats r = fnmadd(n, floats(0.693359375f), x);
  r = fnmadd(n, floats(-2.12194440e-4f), r);
  Floats p = floats(1.9875691500e-4f);
  p = fmadd(p, r, floats(1.3981999507e-3f));
  p = fmadd(p, r, floats(8.3334519073e-3f));
  p = fmadd(p, r, floats(4.1665795894e-2f));
  p = fmadd(p, r, floats(1.6666665459e-1f));
  p = fmadd(p, r, floats(5.0000001201e-1f));
  p = fmadd(p, mul(r, r), add(r, floats(1.0f)));
  return scaled_where(Mask(~tiny), p, n);
}

inline Floats sigmoid(Floats x) {
  const Floats one = floats(1.0f);
  return div(one, add(one, exp(sub(floats(), x))));
}

// tanh(x) = 2 sigmoid(2x) - 1
inline Floats tanh(Floats x) {
  const Floats two = floats(2.0f);
  return fmsub(two, sigmoid(mul(two, x)), floats(1.0f));
}

inline Floats silu(Floats x) { return mul(x, sigmoid(x)); }

// GELU with the tanh approximation.
inline Floats gelu_tanh(Floats x) {
  const Floats cubic = fmadd(mul(mul(x, x), x), floats(0.044715f), x);
  return mul(x, sigmoid(mul(cubic, floats(1.5957691216057308f))));
}

}  // namespace outrider
