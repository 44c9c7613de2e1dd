// Products of rows with a packed weight: y = x W^T.
//
// One pass over a panel of 32 outputs serves up to 12 rows, or 32 on a matrix unit. More rows take several passes over the
// panel, which meanwhile prefetch the next one.
#pragma once

#include <algorithm>
#include <optional>

#include "dots.h"
#include "matrix.h"
#include "products/panel_pass.h"
#include "products/widened.h"

namespace outrider {

// Products of a pass with a panel of a block format. Defined in multiply_blocks.h, which one file of a library includes.
void multiply_blocks(const Pass& pass, int64_t rows);

// The division of a product's rows into passes over each panel. Each thread makes its own object: its lifetime is that of
// the thread's matrix register configuration.
class Passes {
 public:
  Passes(const Weight& weight, int64_t rows)
      : rows_(rows), method_(method_for(weight.format, rows)), block_(block_of(weight)) {
    const int64_t most = method_ == Method::kMatrix ? kMatrixRows : kDotRows;
    count_ = (rows + most - 1) / most;
    each_ = count_ ? (rows + count_ - 1) / count_ : 0;
    if (method_ == Method::kMatrix) registers_.emplace(int(each_));
  }

  int64_t count() const { return count_; }
  // Prefetch distance into the L1 cache, in bytes.
  int64_t near() const { return method_ == Method::kMatrix ? 4 * kNear : kNear; }
  bool few() const { return count_ <= 2; }
  int64_t each() const { return each_; }
  // Chunks of k that the passes over some panels cover before they go on to the next, or 0 if each covers all.
  int64_t block() const { return block_; }
  // Panels that are multiplied together then: as many as leave their results in the second cache, too.
  int64_t together() const {
    constexpr int64_t kFewest = 2, kMost = 8, kBytes = 1 << 19;
    return block_ ? std::clamp(kBytes / (count_ * each_ * kPanel * int64_t(sizeof(float))), kFewest, kMost) : 1;
  }

  // The rows first .. end - 1 of a pass; results of rows before `fresh` exist already.
  struct Part {
    int64_t first, end, fresh;
  };
  // On the matrix unit all passes have one size, because the registers are configured once; so the last pass may start with
  // rows that are done already. Otherwise, the first pass of up to 24 rows takes as many as fit into the time of the memory
  // reads; more rows make passes of equal size.
  Part part(int64_t pass) const {
    if (method_ == Method::kMatrix) {
      const int64_t end = std::min(rows_, (pass + 1) * each_);
      return {end - each_, end, pass * each_};
    }
    const int64_t first = few() ? pass * kDotRows : rows_ * pass / count_;
    return {first, few() ? std::min(rows_, first + kDotRows) : rows_ * (pass + 1) / count_, first};
  }

  void multiply(const Pass& pass, int64_t count) const {
    switch (method_) {
      case Method::kDots: return is_block(pass.weight.format) ? multiply_blocks(pass, count) : kDots[count - 1](pass);
      case Method::kWidened: return multiply_widened(pass, count, kDots[count - 1]);
      case Method::kMatrix: return matrix::multiply(pass, count);
      case Method::kMatrixByVectors: return matrix::multiply_by_vectors(pass, count);
    }
  }

 private:
  // Up to these numbers of rows, vector code with the same results is faster.
  static constexpr int64_t kFewInt8 = 1, kFewBFloat16 = 2;

  enum class Method { kDots, kWidened, kMatrix, kMatrixByVectors };

  static Method method_for(Format format, int64_t rows) {
    if (rows == 0) return Method::kDots;
    if (format == Format::kFloat8) {
      return MatrixUnit::available() ? Method::kMatrix : rows > kPassesOfFew * kDotRows ? Method::kWidened : Method::kDots;
    }
    if (!MatrixUnit::available()) return Method::kDots;
    if (format == Format::kBFloat16) return rows > kFewBFloat16 ? Method::kMatrix : Method::kMatrixByVectors;
    return format == Format::kInt8 && rows > kFewInt8 ? Method::kMatrix : Method::kDots;
  }

  // Rows that do not stay in the second cache beside panels are read a block of k at a time, which does while some panels are
  // multiplied: from the third cache they come at less than half the speed of the matrix unit.
  int64_t block_of(const Weight& weight) const {
    constexpr int64_t kBytes = 1 << 20, kBlock = 1 << 19, kFewest = 4, kMost = 16;  // of all rows, of a block; chunks
    const int64_t chunk = rows_ * bytes_of_chunk(weight.format), chunks = chunks_of(weight);
    if (method_ != Method::kMatrix || chunk * chunks + weight.panel_bytes <= kBytes) return 0;
    const int64_t most = std::clamp(kBlock / chunk, kFewest, kMost);
    if (weight.format != Format::kFloat8) return most;
    const int64_t super_block = weight.groups * kGroup * chunks / weight.k;
    if (super_block == chunks) return most;
    return super_block > kMost ? 0 : std::max(super_block, most / super_block * super_block);
  }

  const int64_t rows_;
  const Method method_;
  const int64_t block_;
  int64_t count_, each_;
  std::optional<MatrixRegisters> registers_;
};

// Multiplies one panel with all rows. epilogue(row, count, tile) receives [count][32] results of rows row .. row + count - 1.
//
// With up to two passes, the first one reads the panel from memory, and the second prefetches the start of the next one. With
// more passes, the first two prefetch half of the next panel each.
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

// A thread's room for the results of passes over some panels.
inline float* results_room(int64_t bytes) {
  static thread_local Buffer memory;
  if (memory.bytes() < size_t(bytes)) memory = Buffer(size_t(bytes));
  return memory.as<float>();
}

// Multiplies the panels begin .. end - 1 with all rows. epilogue(panel, row, count, tile): as of `multiply_panel`; the rows of a
// panel come in order, and so do the panels
template <class Epilogue>
void multiply_panels(const Weight& weight, int64_t begin, int64_t end, const Operand& x, const Passes& passes,
                     Epilogue&& epilogue) {
  if (passes.block() == 0) {
    for (int64_t panel = begin; panel < end; ++panel) {
      multiply_panel(weight, panel, x, passes,
                     [&](int64_t row, int64_t count, const float* tile) { epilogue(panel, row, count, tile); });
    }
    return;
  }
  const int64_t size = passes.each() * kPanel, chunks = chunks_of(weight);
  float* const room = results_room(passes.together() * passes.count() * size * sizeof(float));
  for (; begin < end; begin += passes.together()) {
    const int64_t behind = std::min(end, begin + passes.together());
    for (int64_t chunk = 0, next; chunk < chunks; chunk = next) {
      next = std::min(chunks, chunk + passes.block());
      float* tile = room;
      for (int64_t panel = begin; panel < behind; ++panel) {
        for (int64_t pass = 0; pass < passes.count(); ++pass, tile += size) {
          const auto [first, last, fresh] = passes.part(pass);
          passes.multiply(Pass{weight, panel, x, first, nullptr, 0, false, tile, chunk, next}, last - first);
          if (next == chunks) epilogue(panel, fresh, last - fresh, tile + (fresh - first) * kPanel);
        }
      }
    }
  }
}

// Stores the results of `multiply_panel`, plus the bias if not null, in y: [rows, outputs].
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
