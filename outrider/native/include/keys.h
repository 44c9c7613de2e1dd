// How numbers of a cache are multiplied, in words of 32 bits: float32 number by number, bfloat16 in pairs (pairs.h), in which
// the next number is the upper half of a word.
#pragma once

#include <type_traits>

#include "eight.h"
#include "simd.h"

namespace outrider {

// bfloat16, multiplied on the matrix unit.
struct MatrixBF16 {
  uint16_t bits;
};
template <class T>
constexpr bool kOnMatrixUnit = std::is_same_v<T, MatrixBF16>;

// Of pairs there are, besides what stands here:
//   store_weights  32 numbers as a query has them, for kStep words of 16
//   interleave     each number of a beside that of b, in two vectors; put_in_order undoes what that does to the order
template <class T>
struct Dot;

template <>
struct Dot<float> {
  using Number = float;             // of a query
  static constexpr int kStep = 1;   // numbers in a word
  static constexpr int kQuery = 1;  // words of a query that meet one of the keys
  static Floats add(Floats sum, Ints keys, Ints queries) { return fmadd(as_floats(queries), as_floats(keys), sum); }
  // The same word of a query for all keys.
  static Floats add(Floats sum, Ints keys, const int32_t* query) { return add(sum, keys, ints(*query)); }
  // The next `count` numbers, which may be stored in a narrower format, as 16 words.
  template <class P>
  static Ints load_words(const P* from, int64_t count) {
    return as_ints(load(from, lanes(count)));
  }
};

}  // namespace outrider

#include "pairs.h"

namespace outrider {

// function(T, P): a number of the format that is computed in, and of that of the pools.
template <class Function>
void with_formats(bool bfloat16, PoolFormat pools, Function&& function) {
  auto with = [&](auto computed) {
    switch (pools) {
      case PoolFormat::kE4M3: return function(computed, E4M3{});
      case PoolFormat::kE5M2: return function(computed, E5M2{});
      case PoolFormat::kBFloat16: return function(computed, BF16{});
      default: return function(float{}, float{});  // there is no narrower computation on wide pools
    }
  };
  if (bfloat16) with(BF16{});
  else with(float{});
}

}  // namespace outrider
