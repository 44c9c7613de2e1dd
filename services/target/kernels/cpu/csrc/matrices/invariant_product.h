// Batch-invariant products of rows with weights in PyTorch's layout, and elementwise functions: only the length of a sum
// decides the order of its additions, so a result's bits do not depend on its place or on the other rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kv_dot.h"

namespace outrider {

constexpr int64_t kOutputBlock = 64;  // outputs of a task
constexpr int64_t kRowBlock = 64;     // rows of a task

// y = x W^T (+ bias), for groups of adjacent rows with one matrix a group. Strides in numbers.
struct Product {
  const int64_t* first;  // [groups + 1], the first row of each group
  const int64_t* which;  // [groups], the matrix of each group
  int64_t groups, inputs, outputs;
  const void* x;  // [rows, inputs]
  const void* weight;
  int64_t matrix_stride, weight_stride;
  int32_t by_inputs;  // 0: a matrix is [outputs][inputs]; 1: [inputs][outputs]. weight_stride is of the first dimension
  int32_t bfloat16;   // format of x, weight and y; else float32
  const float* bias;  // [matrices, outputs] or null
  void* y;            // [rows, outputs]
};

// A step of a dot product: a vector of words.
template <class T>
struct Step {
  using Words = Dot<T>;
  static constexpr int64_t kNumbers = kLanes * Words::kStep;
};

inline float number(float value) { return value; }
inline float number(BF16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
inline void put(float* to, float value) { *to = value; }
inline void put(BF16* to, float value) { store(to, floats(value), 1); }

// M rows with N outputs of a matrix [outputs][inputs].
template <class T, int M, int N>
void dots(const T* x, const T* weight, int64_t weight_stride, int64_t inputs, float sums[][N]) {
  using S = Step<T>;
  Floats sum[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = floats();
  }
  auto step = [&](auto fetch) {
    Ints w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) w[n] = fetch(weight + n * weight_stride);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Ints row = fetch(x + m * inputs);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = S::Words::add(sum[m][n], row, w[n]);
    }
  };
  int64_t k = 0;
  for (; k + S::kNumbers <= inputs; k += S::kNumbers) {
    step([&](const T* from) { return S::Words::load_words(from + k, S::kNumbers); });
  }
  if (k < inputs) step([&](const T* from) { return S::Words::load_words(from + k, inputs - k); });
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[m][n] = sum_of(sum[m][n]);
  }
}

// M rows with up to 32 outputs of a matrix [inputs][outputs].
template <class T, int M>
void columns(const T* x, const T* weight, int64_t weight_stride, int64_t inputs, int64_t outputs, float sums[][32]) {
  Floats sum[M][2];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = floats();
  const Mask low = lanes(outputs), high = lanes(outputs - kLanes);
  for (int64_t k = 0; k < inputs; ++k, weight += weight_stride) {
    const Floats w0 = load(weight, low), w1 = load(weight + kLanes, high);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Floats value = floats(number(x[m * inputs + k]));
      sum[m][0] = fmadd(value, w0, sum[m][0]);
      sum[m][1] = fmadd(value, w1, sum[m][1]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    store(sums[m], sum[m][0]);
    store(sums[m] + kLanes, sum[m][1]);
  }
}

// Some rows of a group with some outputs.
template <class T>
class ProductBlock {
 public:
  ProductBlock(const Product& product, int64_t group)
      : product_(product),
        weight_(static_cast<const T*>(product.weight) + product.which[group] * product.matrix_stride),
        bias_(product.bias ? product.bias + product.which[group] * product.outputs : nullptr) {}

  void run(int64_t row, int64_t row_end, int64_t output, int64_t output_end) const {
    const int64_t width = product_.by_inputs ? 32 : 4;
    for (int64_t n = output; n < output_end; n += width) {
      const int64_t some = std::min(width, output_end - n);
      for (int64_t m = row; m < row_end; m += 4) {
        switch (std::min<int64_t>(4, row_end - m)) {
          case 4: tile<4>(m, n, some); break;
          case 3: tile<3>(m, n, some); break;
          case 2: tile<2>(m, n, some); break;
          default: tile<1>(m, n, some);
        }
      }
    }
  }

 private:
  template <int M>
  void tile(int64_t row, int64_t output, int64_t outputs) const {
    const T* x = static_cast<const T*>(product_.x) + row * product_.inputs;
    if (product_.by_inputs) {
      alignas(64) float sums[M][32];
      columns<T, M>(x, weight_ + output, product_.weight_stride, product_.inputs, outputs, sums);
      for (int m = 0; m < M; ++m) finish(row + m, output, outputs, sums[m]);
    } else if (outputs == 4) {
      float sums[M][4];
      dots<T, M, 4>(x, weight_ + output * product_.weight_stride, product_.weight_stride, product_.inputs, sums);
      for (int m = 0; m < M; ++m) finish(row + m, output, 4, sums[m]);
    } else {
      for (int64_t n = 0; n < outputs; ++n) {
        float sums[M][1];
        dots<T, M, 1>(x, weight_ + (output + n) * product_.weight_stride, 0, product_.inputs, sums);
        for (int m = 0; m < M; ++m) finish(row + m, output + n, 1, sums[m]);
      }
    }
  }

  void finish(int64_t row, int64_t output, int64_t outputs, const float* sums) const {
    T* to = static_cast<T*>(product_.y) + row * product_.outputs + output;
    for (int64_t n = 0; n < outputs; ++n) put(to + n, bias_ ? sums[n] + bias_[output + n] : sums[n]);
  }

  const Product& product_;
  const T* weight_;
  const float* bias_;
};

enum class Function : int32_t { kSigmoid = 0, kSilu = 1, kGeluTanh = 2 };

inline Floats apply(Function function, Floats x) {
  switch (function) {
    case Function::kSigmoid:
      return select(unordered(x, x), x, sigmoid(x));  // NaN stays NaN
    case Function::kSilu: return silu(x);
    default: return gelu_tanh(x);
  }
}

template <class T>
void apply_to(Function function, const T* x, T* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask mask = lanes(count - i);
    store(y + i, apply(function, load(x + i, mask)), mask);
  }
}

}  // namespace outrider
