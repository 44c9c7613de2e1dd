// Products of a few rows with a panel of 8-bit floats, by dot products of bfloat16.
#pragma once

#include "products/float8_pass.h"
#include "dot_steps.h"

namespace outrider {

// Widens 8-bit floats to bfloat16, times 2^-8. Sign, exponent and fraction move to their places, and the exponent's upper bits
// are set. The instruction that multiplies takes subnormal numbers of bfloat16 as 0, so the eight numbers without an exponent
// get one from a table.
struct Float8Lines {
  const __m512i ordinary = _mm512_set1_epi16(0x3800), exponent = _mm512_set1_epi16(0x78), kept = _mm512_set1_epi16(int16_t(0x87F0));
  // What changes the bits of k 2^-17, k = 0 ... 7, which are k 2^4 by then.
  const __m512i subnormal = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3710, 0x37A0, 0x37F0, 0x3840, 0x3870, 0x3820, 0x3810));

  // Two k of 16 outputs.
  [[gnu::always_inline]] __m512i load(const char* from) const {
    constexpr int kChanged = 0x6A;  // (a & b) ^ c
    const __m512i bits = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __mmask32 small = _mm512_testn_epi16_mask(bits, exponent);
    const __m512i change = _mm512_mask_permutexvar_epi16(ordinary, small, bits, subnormal);
    return _mm512_ternarylogic_epi32(_mm512_slli_epi16(bits, 4), kept, change, kChanged);
  }
};

// Bytes of a group of 64 k as bfloat16.
constexpr int64_t kWideGroup = kGroup * kPanel * 2;

[[gnu::noinline]] inline void widen_group(const char* from, char* to) {
  const Float8Lines lines;
  for (int64_t i = 0; i < kGroup * kPanel / 32; ++i) _mm512_store_si512(to + i * 64, lines.load(from + i * 32));
}

// A thread's room for a panel as bfloat16, or for a group of one that a single pass reads.
inline char* wide_panel(const Pass& pass) {
  static thread_local Buffer memory;
  const size_t bytes = size_t(pass.x.rows <= kDotRows ? kWideGroup : pass.weight.k / kGroup * kWideGroup);
  if (memory.bytes() < bytes) memory = Buffer(bytes);
  return memory.as<char>();
}

// Few rows widen numbers in the loop that multiplies them. More rows read them widened, which the first pass does for all
// passes over the panel. To the same bits.
template <int M>
[[gnu::noinline]] void tile_float8(const Pass& pass) {
  constexpr bool kFew = M <= kFewRows;
  const Float8Lines lines;
  constexpr int64_t kSteps = kChunk / 4;  // of two k, of a chunk
  char* wide = kFew ? nullptr : wide_panel(pass);
  __m512 sum[M][2];
  each_float8_group<M>(pass, [&](const Float8Group& group, float* sums) __attribute__((always_inline)) {
    if (group.fresh) {
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
    }
    const char* weight = group.values;
    if constexpr (!kFew) {
      char* room = wide + (pass.x.rows <= kDotRows ? 0 : group.index * kWideGroup);
      if (pass.row == 0) widen_group(weight, room);
      weight = room;
    }
    int64_t line = group.line;
    for (int64_t chunk = 2 * group.index; chunk < 2 * group.index + 2; ++chunk) {
      const char* x = pass.chunk(chunk);
#pragma GCC unroll 1
      for (int64_t i = 0; i < kSteps; i += 2, x += 8, weight += kFew ? 128 : 256) {
        pass.fetch(line++);
#pragma GCC unroll 2
        for (int64_t j = 0; j < 2; ++j) {
          if constexpr (kFew) {
            step<Pairs, M>(sum, lines.load(weight + j * 64), lines.load(weight + j * 64 + 32), x + j * 4);
          } else {
            const char* from = weight + j * 128;
            step<Pairs, M>(sum, _mm512_load_si512(from), _mm512_load_si512(from + 64), x + j * 4);
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      store(sums + m * kPanel, sum[m][0]);
      store(sums + m * kPanel + kLanes, sum[m][1]);
    }
  });
}

template <int M>
void multiply_float8(const Pass& pass) {
  tile_float8<M>(pass);
}

}  // namespace outrider
