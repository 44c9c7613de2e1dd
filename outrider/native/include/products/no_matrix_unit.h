// For processors without a matrix unit: these stand in for the names of avx512/matrix.h.
#pragma once

#include "products/panel_pass.h"

namespace outrider {

constexpr bool kHasMatrixUnit = false;
constexpr int kMatrixRows = 1;

struct MatrixUnit {
  static constexpr bool available() { return false; }
  static bool use(bool) { return false; }
};

struct MatrixRegisters {
  explicit MatrixRegisters(int) {}
};

namespace matrix {

inline void multiply(const Pass&, int64_t) {}
inline void multiply_by_vectors(const Pass&, int64_t) {}

}  // namespace matrix

}  // namespace outrider
