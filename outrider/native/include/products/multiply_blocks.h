// Definition of `multiply_blocks`, which one file of a library includes: the kernels take long to compile.
#pragma once

#include <utility>

#include "block_dots.h"
#include "float8_dots.h"

namespace outrider {

template <Format FORMAT, int... M>
void multiply_format(const Pass& pass, int64_t rows, std::integer_sequence<int, M...>) {
  static constexpr void (*kKernels[])(const Pass&) = {multiply_blocks<FORMAT, M + 1>...};
  kKernels[rows - 1](pass);
}

template <int... M>
void multiply_floats(const Pass& pass, int64_t rows, std::integer_sequence<int, M...>) {
  static constexpr void (*kKernels[])(const Pass&) = {multiply_float8<M + 1>...};
  kKernels[rows - 1](pass);
}

void multiply_blocks(const Pass& pass, int64_t rows) {
  constexpr auto kRows = std::make_integer_sequence<int, kDotRows>();
  switch (pass.weight.format) {
    case Format::kSymmetric4: return multiply_format<Format::kSymmetric4>(pass, rows, kRows);
    case Format::kSymmetric5: return multiply_format<Format::kSymmetric5>(pass, rows, kRows);
    case Format::kSymmetric8: return multiply_format<Format::kSymmetric8>(pass, rows, kRows);
    case Format::kAffine4: return multiply_format<Format::kAffine4>(pass, rows, kRows);
    case Format::kAffine5: return multiply_format<Format::kAffine5>(pass, rows, kRows);
    case Format::kK4: return multiply_format<Format::kK4>(pass, rows, kRows);
    case Format::kK5: return multiply_format<Format::kK5>(pass, rows, kRows);
    case Format::kK6: return multiply_format<Format::kK6>(pass, rows, kRows);
    case Format::kFloat8: return multiply_floats(pass, rows, kRows);
    default: return;
  }
}

}  // namespace outrider
