// Dot products with numbers of a KV cache, in 32-bit words: a word holds one float32, or two bfloat16 (kv_dot_bf16.h), the second
// in its upper half.
#pragma once

#include <type_traits>

#include "fp8.h"
#include "simd.h"

namespace outrider {

// bfloat16, multiplied on the matrix unit.
struct MatrixBF16 {
  uint16_t bits;
};
template <class T>
constexpr bool kOnMatrixUnit = std::is_same_v<T, MatrixBF16>;

// Dot<BF16> has, in addition to the members of Dot<float>:
//   store_weights  stores 32 numbers in the layout of a query
//   interleave     pairs the numbers of a and b in two vectors; put_in_order restores the order of the sums
template <class T>
struct Dot;

template <>
struct Dot<float> {
  using Number = float;             // format of a query
  static constexpr int kStep = 1;   // numbers in a word
  static constexpr int kQuery = 1;  // words of a query for one word of a key
  static Floats add(Floats sum, Ints keys, Ints queries) { return fmadd(as_floats(queries), as_floats(keys), sum); }
  // One word of a query, broadcast to all keys.
  static Floats add(Floats sum, Ints keys, const int32_t* query) { return add(sum, keys, ints(*query)); }
  // Loads the next `count` numbers, perhaps of a narrower format, as 16 words.
  template <class P>
  static Ints load_words(const P* from, int64_t count) {
    return as_ints(load(from, lanes(count)));
  }
};

}  // namespace outrider

#include "kv_dot_bf16.h"

namespace outrider {

// Calls function(T, P) with values of the computation's format and of the pools' format.
template <class Function>
void with_formats(bool bfloat16, PoolFormat pools, Function&& function) {
  auto with = [&](auto computed) {
    switch (pools) {
      case PoolFormat::kE4M3: return function(computed, E4M3{});
      case PoolFormat::kE5M2: return function(computed, E5M2{});
      case PoolFormat::kBFloat16: return function(computed, BF16{});
      default: return function(float{}, float{});  // float32 pools are always computed in float32
    }
  };
  if (bfloat16) with(BF16{});
  else with(float{});
}

}  // namespace outrider
