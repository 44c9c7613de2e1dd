// Products of rows with a panel on the processor's matrix unit (Intel AMX), if it has one: an instruction multiplies 16 rows
// with 16 outputs, 64 bytes of each. Operands and panels already have its layout.
//
// A row's sums do not depend on the other rows. bfloat16 sums are rounded in another order than in dots.h, so a machine uses
// one of the two for all products; int8 sums are the same integers in both.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "dots.h"
#include "products/widened.h"

namespace outrider {

constexpr bool kHasMatrixUnit = true;  // some AVX-512 processors have one
constexpr int kMatrixRows = 32;  // rows of one pass: two blocks of 16, each with the panel's two halves

class MatrixUnit {
 public:
  static bool available() { return state().load(std::memory_order_relaxed); }

  // Enables or disables it, for tests that compare both. Returns the previous setting.
  static bool use(bool wanted) { return state().exchange(wanted && usable()); }

 private:
  static std::atomic<bool>& state() {
    static std::atomic<bool> used(usable());
    return used;
  }
  static bool usable() {
    static const bool can = has_instructions() && may_use();
    return can;
  }
  static bool has_instructions() {
    constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25, kAll = kBFloat16 | kTiles | kInt8;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAll) == kAll;
  }
  // Linux saves the registers only for processes that requested it.
  static bool may_use() {
    constexpr long kAskForState = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  }
};

// The matrix register configuration of a thread: 0-3 hold sums, 4 and 5 rows, 6 and 7 weights.
class MatrixRegisters {
 public:
  explicit MatrixRegisters(int rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};  // row size of each register
      uint8_t rows[16] = {};
    } layout;
    const int first = std::min(rows, 16), second = std::max(rows - 16, 1);
    const int heights[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; ++i) layout.bytes[i] = 64, layout.rows[i] = uint8_t(heights[i]);
    asm volatile("ldtilecfg %0" ::"m"(layout));
  }
  ~MatrixRegisters() { asm volatile("tilerelease"); }
  MatrixRegisters(const MatrixRegisters&) = delete;
  MatrixRegisters& operator=(const MatrixRegisters&) = delete;
};

namespace matrix {

// INDEX: a register
template <int INDEX>
void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(INDEX));
}
template <int INDEX>
void read(const char* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(INDEX), "r"(from), "r"(stride) : "memory");
}
template <int INDEX>
void write(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(INDEX), "r"(to), "r"(stride) : "memory");
}
// SUM += rows x weights, of bfloat16 pairs, or of fours of signed with unsigned bytes.
template <Format FORMAT, int SUM, int ROWS, int WEIGHTS>
void add() {
  if constexpr (FORMAT == Format::kBFloat16) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(WEIGHTS));
  } else {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(WEIGHTS));
  }
}

template <bool MORE>
void clear_sums() {
  clear<0>(), clear<1>();
  if constexpr (MORE) clear<2>(), clear<3>();
}

// Products of 64 bytes of each row. MORE: more than 16 rows
template <Format FORMAT, bool MORE>
void add_chunk(const char* x, const char* weight) {
  read<4>(x, kChunk);
  read<6>(weight, 128);
  add<FORMAT, 0, 4, 6>();
  read<7>(weight + 64, 128);
  add<FORMAT, 1, 4, 7>();
  if constexpr (MORE) {
    read<5>(x + 16 * kChunk, kChunk);
    add<FORMAT, 2, 5, 6>();
    add<FORMAT, 3, 5, 7>();
  }
}

// Products with a chunk of a panel. Prefetches double the unit's time, so only passes bound by memory prefetch.
template <Format FORMAT, bool MORE>
void add_chunk(const Pass& pass, int64_t chunk) {
  constexpr int64_t kLines = 16;  // of 128 bytes
  for (int64_t i = 0; i < kLines && pass.streams; ++i) pass.fetch(chunk * kLines + i);
  add_chunk<FORMAT, MORE>(pass.chunk(chunk), pass.begin() + chunk * kLines * 128);
}

// to: [rows, 32] of 32 bits
template <bool MORE>
void write_sums(void* to) {
  constexpr int64_t kRow = kPanel * 4;
  char* first = static_cast<char*>(to);
  write<0>(first, kRow);
  write<1>(first + 64, kRow);
  if constexpr (MORE) {
    write<2>(first + 16 * kRow, kRow);
    write<3>(first + 16 * kRow + 64, kRow);
  }
}

// from: as `write_sums` left them
template <bool MORE>
void read_sums(const void* from) {
  constexpr int64_t kRow = kPanel * 4;
  const char* first = static_cast<const char*>(from);
  read<0>(first, kRow);
  read<1>(first + 64, kRow);
  if constexpr (MORE) {
    read<2>(first + 16 * kRow, kRow);
    read<3>(first + 16 * kRow + 64, kRow);
  }
}

template <bool MORE>
void multiply_bfloat16(const Pass& pass) {
  pass.begins() ? clear_sums<MORE>() : read_sums<MORE>(pass.tile);
  for (int64_t chunk = pass.first_chunk; chunk < pass.end_chunk; ++chunk) add_chunk<Format::kBFloat16, MORE>(pass, chunk);
  write_sums<MORE>(pass.tile);
}

// Adds a group's integer sums to the results. sums: [rows, 32]
inline void add_group(const Pass& pass, int64_t rows, int64_t group, const int32_t* sums) {
  const int64_t index = group * pass.x.rows + pass.row;
  float* tile = pass.tile;
  for (int64_t m = 0; m < rows; ++m) {
    const __m512i offset = _mm512_set1_epi32(pass.x.offsets[index + m]);
    const __m512 scale = _mm512_set1_ps(pass.x.scales[index + m]);
#pragma GCC unroll 2
    for (int z = 0; z < 2; ++z, sums += kLanes, tile += kLanes) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(sums), offset));
      store(tile, _mm512_fmadd_ps(sum, scale, load(tile)));
    }
  }
}

template <bool MORE>
void multiply_int8(const Pass& pass, int64_t rows) {
  alignas(64) int32_t sums[2][(MORE ? 32 : 16) * kPanel];
  if (pass.begins()) std::memset(pass.tile, 0, size_t(rows) * kPanel * sizeof(float));
  const int64_t first = pass.first_chunk, end = pass.end_chunk;
  for (int64_t group = first; group < end; ++group) {
    clear_sums<MORE>();
    add_chunk<Format::kInt8, MORE>(pass, group);
    write_sums<MORE>(sums[group % 2]);
    if (group > first) add_group(pass, rows, group - 1, sums[(group - 1) % 2]);  // while the unit is busy with the next
  }
  add_group(pass, rows, end - 1, sums[(end - 1) % 2]);
  if (pass.ends()) pass.scale_columns(rows);
}

// Widens 8-bit floats a chunk ahead of the unit, or, if there are more passes, the first one does for all of them. Parts of k
// are whole super-blocks, or parts of the only one, whose sums wait in the tile for their units.
template <bool MORE>
void multiply_float8(const Pass& pass, int64_t rows) {
  constexpr int64_t kNumbers = kChunk / 2 * kPanel, kLines = kNumbers / 128, kRoom = 4;  // chunks, of a single pass
  alignas(64) float sums[2][(MORE ? 32 : 16) * kPanel];
  const int64_t each = pass.weight.groups * kGroup * kPanel / kNumbers, begin = pass.first_chunk, end = pass.end_chunk;
  const bool widens = pass.row == 0, once = pass.x.rows <= kMatrixRows, only = each == pass.chunks();
  char* const room = wide_room((once ? kRoom : end - begin) * kNumbers * 2);
  auto room_of = [&](int64_t chunk) { return room + (once ? chunk % kRoom : chunk - begin) * kNumbers * 2; };
  const Float8Lines lines;
  auto widen = [&](int64_t chunk) {
    const SuperBlock from(pass, chunk / each);
    const int64_t first = chunk % each * kLines;
    char* to = room_of(chunk);
    for (int64_t line = first; line < first + kLines; ++line, to += 256) {
      if (pass.streams) pass.fetch(from.line + line);
      lines.widen(from.values + line * 128, to);
    }
  };
  auto clear_tile = [&] { std::memset(pass.tile, 0, size_t(rows) * kPanel * sizeof(float)); };
  auto add = [&](int64_t block, int64_t first, int64_t end) {
    add_super_block(pass.tile, SuperBlock(pass, block).units, sums[block % 2], first, end);
  };
  if (pass.begins() && !only) clear_tile();
  if (widens) widen(begin);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t block = chunk / each, i = chunk % each;
    if (i == 0) clear_sums<MORE>();
    else if (chunk == begin) read_sums<MORE>(pass.tile);
    if (widens && chunk + 1 < end) widen(chunk + 1);
    add_chunk<Format::kBFloat16, MORE>(pass.chunk(chunk), room_of(chunk));
    if (block > begin / each) add(block - 1, rows * i / each, rows * (i + 1) / each);  // while the unit is busy
    if (i == each - 1) write_sums<MORE>(sums[block % 2]);
  }
  if (only && !pass.ends()) return write_sums<MORE>(pass.tile);
  if (only) clear_tile();
  add((end - 1) / each, 0, rows);
}

// The result of `multiply_bfloat16`, bit for bit, with vectors, which are faster for one or two rows if the weights are in a
// near cache. The unit sums even and odd k separately, over 32 of each, and treats subnormal numbers as 0.
template <int M>
[[gnu::noinline]] void multiply_apart(const Pass& pass) {
  const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
  __m512 total[M][2];
  for (int m = 0; m < M; ++m) total[m][0] = total[m][1] = _mm512_setzero_ps();
  const char* weight = pass.begin();
  for (int64_t chunk = 0; chunk < pass.chunks(); ++chunk) {
    const char* x = pass.chunk(chunk);
    __m512 even[M][2], odd[M][2];
    for (int m = 0; m < M; ++m) even[m][0] = even[m][1] = odd[m][0] = odd[m][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < 16; ++i, x += 4, weight += 128) {
      pass.fetch(chunk * 16 + i);
      __m512 w[2][2];
#pragma GCC unroll 2
      for (int z = 0; z < 2; ++z) {
        const __m512i both = _mm512_loadu_si512(weight + z * 64);
        w[z][0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        w[z][1] = _mm512_castsi512_ps(_mm512_and_si512(both, high));
      }
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m) {
        int32_t bits;
        std::memcpy(&bits, x + m * kChunk, 4);
        const __m512i both = _mm512_set1_epi32(bits);
        const __m512 x0 = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        const __m512 x1 = _mm512_castsi512_ps(_mm512_and_si512(both, high));
#pragma GCC unroll 2
        for (int z = 0; z < 2; ++z) {
          even[m][z] = _mm512_fmadd_ps(x0, w[z][0], even[m][z]);
          odd[m][z] = _mm512_fmadd_ps(x1, w[z][1], odd[m][z]);
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int z = 0; z < 2; ++z) total[m][z] = _mm512_add_ps(total[m][z], _mm512_add_ps(even[m][z], odd[m][z]));
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int z = 0; z < 2; ++z) store(pass.tile + m * kPanel + z * kLanes, total[m][z]);
  }
}

// One or two rows.
inline void multiply_by_vectors(const Pass& pass, int64_t rows) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  rows == 1 ? multiply_apart<1>(pass) : multiply_apart<2>(pass);
  _mm_setcsr(mode);
}

// rows: as the registers are configured
inline void multiply(const Pass& pass, int64_t rows) {
  if (pass.weight.format == Format::kInt8) {
    return rows > 16 ? multiply_int8<true>(pass, rows) : multiply_int8<false>(pass, rows);
  }
  if (pass.weight.format == Format::kFloat8) {
    return rows > 16 ? multiply_float8<true>(pass, rows) : multiply_float8<false>(pass, rows);
  }
  return rows > 16 ? multiply_bfloat16<true>(pass) : multiply_bfloat16<false>(pass);
}

}  // namespace matrix

}  // namespace outrider
