// The arithmetic of split.h on the matrix unit (outrider/native/include/avx512/matrix.h). The unit multiplies the layout of
// split.h: 16 query vectors at a time with 16 columns, or with 16 numbers of the values.
//
// Words and columns are padded with zeros to multiples of 16 and 32. Sums are rounded in another order than in split.h, so a
// machine with the unit computes all attention on it.
#pragma once

#include "matrix.h"
#include "split.h"

namespace outrider {

#ifdef __AVX512BF16__  // without it the target has no matrix unit

// Products of 16 rows with W blocks of 16 columns. rows, weights: addresses of the first words; strides in words.
template <int W>
void multiply_words(const int32_t* rows, int64_t row_stride, const int32_t* weights, int64_t weight_stride, int64_t words,
                    float* to, int64_t to_stride) {
  using namespace matrix;
  constexpr auto kFormat = Format::kBFloat16;
  clear<0>();
  if constexpr (W > 1) clear<1>();
  if constexpr (W > 2) clear<2>();
  if constexpr (W > 3) clear<3>();
  for (int64_t word = 0; word < words; word += kLanes) {
    const char* from = reinterpret_cast<const char*>(weights + word * weight_stride);
    read<4>(reinterpret_cast<const char*>(rows + word), row_stride * 4);
    read<5>(from, weight_stride * 4);
    add<kFormat, 0, 4, 5>();
    if constexpr (W > 1) read<6>(from + 64, weight_stride * 4), add<kFormat, 1, 4, 6>();
    if constexpr (W > 2) read<7>(from + 128, weight_stride * 4), add<kFormat, 2, 4, 7>();
    if constexpr (W > 3) read<5>(from + 192, weight_stride * 4), add<kFormat, 3, 4, 5>();
  }
  write<0>(to, to_stride * 4);
  if constexpr (W > 1) write<1>(to + kLanes, to_stride * 4);
  if constexpr (W > 2) write<2>(to + 2 * kLanes, to_stride * 4);
  if constexpr (W > 3) write<3>(to + 3 * kLanes, to_stride * 4);
}

// All columns of a product with 16 rows.
inline void multiply_all(const int32_t* rows, int64_t row_stride, const int32_t* weights, int64_t weight_stride, int64_t words,
                         int64_t columns, float* to, int64_t to_stride) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes) {
    multiply_words<4>(rows, row_stride, weights + column, weight_stride, words, to + column, to_stride);
  }
  for (; column < columns; column += kLanes) {
    multiply_words<1>(rows, row_stride, weights + column, weight_stride, words, to + column, to_stride);
  }
}

template <>
inline void score<MatrixBF16>(int, const int32_t* queries, int64_t words, const int32_t* keys, int64_t stride, int columns,
                              float* scores) {
  multiply_all(queries, words, keys, stride, words, columns, scores, kMaxColumns);
}

template <>
inline void combine<MatrixBF16>(int count, const int32_t* weights, const int32_t* values, int64_t wide, int words,
                                float* sums) {
  multiply_all(weights, kSplit, values, wide, words, wide, sums, wide);
  for (int n = 0; n < count; ++n) {
    for (int64_t d = 0; d < wide; d += 2 * kLanes) {
      Floats sum[2] = {load(sums + n * wide + d), load(sums + n * wide + d + kLanes)};
      Dot<MatrixBF16>::put_in_order(sum);
      store(sums + n * wide + d, sum[0]);
      store(sums + n * wide + d + kLanes, sum[1]);
    }
  }
}

#endif

// with_formats, on the matrix unit if the processor has one.
template <class Function>
void with_arithmetic(bool bfloat16, PoolFormat pools, Function&& function) {
  with_formats(bfloat16, pools, [&](auto computed, auto stored) {
    if constexpr (kHasMatrixUnit && std::is_same_v<decltype(computed), BF16>) {
      if (MatrixUnit::available()) return function(MatrixBF16{}, stored);
    }
    function(computed, stored);
  });
}

// The registers of a thread that attends.
template <class T>
struct Registers {
  Registers() {}
};
template <>
struct Registers<MatrixBF16> : MatrixRegisters {
  Registers() : MatrixRegisters(kMatrixRows) {}
};

}  // namespace outrider
