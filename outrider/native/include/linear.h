// Products of rows with a laid-out weight: y = x W^T.
//
// A panel of 32 outputs is read once for up to 12 rows, or 32 on a matrix unit; more take several passes over it, while
// the next panel comes from memory.
#pragma once

#include <algorithm>
#include <optional>

#include "dots.h"
#include "matrix.h"
#include "pass.h"

namespace outrider {

// How the rows of a product are divided among passes over each panel. Made by each thread for itself: while this lives,
// its matrix registers are laid out for it.
class Passes {
 public:
  Passes(const Weight& weight, int64_t rows) : rows_(rows), way_(way_for(weight.format, rows)) {
    const int64_t most = way_ == Way::kMatrix ? kMatrixRows : kDotRows;
    count_ = (rows + most - 1) / most;
    each_ = count_ ? (rows + count_ - 1) / count_ : 0;
    if (way_ == Way::kMatrix) registers_.emplace(int(each_));
  }

  int64_t count() const { return count_; }
  // How far ahead in the panel what comes from memory is brought nearest, in bytes.
  int64_t near() const { return way_ == Way::kMatrix ? 4 * kNear : kNear; }
  bool few() const { return count_ <= 2; }

  // The rows of a pass, all of them or from `fresh` on.
  struct Part {
    int64_t first, end, fresh;
  };
  // On the matrix unit passes are of one size, for registers are laid out once; so the last one may begin with rows that
  // are done already. Others: of up to 24 rows, the first pass takes as many as the memory leaves time for; more make
  // passes of like size.
  Part part(int64_t pass) const {
    if (way_ == Way::kMatrix) {
      const int64_t end = std::min(rows_, (pass + 1) * each_);
      return {end - each_, end, pass * each_};
    }
    const int64_t first = few() ? pass * kDotRows : rows_ * pass / count_;
    return {first, few() ? std::min(rows_, first + kDotRows) : rows_ * (pass + 1) / count_, first};
  }

  void multiply(const Pass& pass, int64_t count) const {
    switch (way_) {
      case Way::kDots: return kDots[count - 1](pass);
      case Way::kMatrix: return matrix::multiply(pass, count);
      case Way::kAsMatrix: return matrix::multiply_by_vectors(pass, count);
    }
  }

 private:
  // Vectors, which have the same results, are faster for so few rows.
  static constexpr int64_t kFewInt8 = 1, kFewBFloat16 = 2;

  enum class Way { kDots, kMatrix, kAsMatrix };

  static Way way_for(Format format, int64_t rows) {
    if (rows == 0 || !MatrixUnit::available()) return Way::kDots;
    if (format == Format::kBFloat16) return rows > kFewBFloat16 ? Way::kMatrix : Way::kAsMatrix;
    return format == Format::kInt8 && rows > kFewInt8 ? Way::kMatrix : Way::kDots;
  }

  const int64_t rows_;
  const Way way_;
  int64_t count_, each_;
  std::optional<MatrixRegisters> registers_;
};

// One panel for all rows. epilogue(row, count, tile): takes [count][32] results of rows row .. row + count - 1.
//
// Of up to two passes the first takes the panel from memory, and the second brings the next one's beginning. Of more, the
// first two bring half of the next panel each.
template <class Epilogue>
void multiply_panel(const Weight& weight, int64_t panel, const Operand& x, const Passes& passes, Epilogue&& epilogue) {
  alignas(64) float tile[std::max(kDotRows, kMatrixRows) * kPanel];
  for (int64_t pass = 0; pass < passes.count(); ++pass) {
    const auto [first, end, fresh] = passes.part(pass);
    const bool streams = passes.few() && pass == 0;
    const int64_t half = passes.few() ? 0 : std::min<int64_t>(pass, 1) * weight.panel_bytes / 2;
    const char* ahead = streams ? weight.panel(panel) + passes.near() : weight.panel(panel + 1) + half;
    const int64_t ahead_step = streams ? 64 : passes.few() ? 16 : 32;
    passes.multiply(Pass{weight, panel, x, first, ahead, ahead_step, streams, tile}, end - first);
    epilogue(fresh, end - fresh, tile + (fresh - first) * kPanel);
  }
}

// The results of `multiply_panel`, with a bias if there is one, to where they belong in y: [rows, outputs].
template <class Y>
void store_panel(const Weight& weight, int64_t panel, int64_t row, int64_t count, const float* tile, const float* bias,
                 Y* y) {
  for (int z = 0; z < 2; ++z) {
    const int64_t n = panel * kPanel + z * kLanes;
    const Mask mask = lanes(weight.outputs - n);
    for (int64_t m = 0; m < count; ++m) {
      Floats value = load(tile + m * kPanel + z * kLanes);
      if (bias) value = add(value, load(bias + n, mask));
      store(y + (row + m) * weight.outputs + n, value, mask);
    }
  }
}

}  // namespace outrider
