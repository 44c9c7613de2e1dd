// Coupled Gumbel noise, with the bits of outrider/speculation/noise.py.
#pragma once

#include "simd.h"

namespace outrider {

constexpr uint32_t kTokenStep = 0x9E3779B1, kMixA = 0x7FEB352D, kMixB = 0x846CA68B;

// The largest possible noise, and the difference between the largest and the smallest, both with a margin.
constexpr float kMaxNoise = 22.9f, kNoiseRange = 26.1f;

struct NoiseKey {
  uint32_t first, second;
};

// The key of an absolute position under a seed: Philox4x32-10.
inline NoiseKey noise_key(uint64_t seed, uint64_t position) {
  uint32_t counter[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{counter[0]} * 0xD2511F53u, product1 = uint64_t{counter[2]} * 0xCD9E8D57u;
    const uint32_t next[4] = {uint32_t(product1 >> 32) ^ counter[1] ^ key0, uint32_t(product1),
                              uint32_t(product0 >> 32) ^ counter[3] ^ key1, uint32_t(product0)};
    std::memcpy(counter, next, sizeof(counter));
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {counter[0], counter[1]};
}

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * kMixA;
  x = (x ^ (x >> 15)) * kMixB;
  return x ^ (x >> 16);
}
inline uint32_t noise_bits(NoiseKey key, uint32_t token) {
  return mix(mix(token * kTokenStep ^ key.first) ^ key.second);
}

inline Ints mix(Ints x) {
  x = mul(bit_xor(x, shift_right<16>(x)), ints(int(kMixA)));
  x = mul(bit_xor(x, shift_right<15>(x)), ints(int(kMixB)));
  return bit_xor(x, shift_right<16>(x));
}
inline Ints noise_bits(NoiseKey key, Ints tokens) {
  const Ints stepped = mul(tokens, ints(int(kTokenStep)));
  const Ints first = mix(bit_xor(stepped, ints(int(key.first))));
  return mix(bit_xor(first, ints(int(key.second))));
}

// Gumbel noise from random bits, computed in float64 and rounded to float32.
inline float gumbel(uint32_t bits) {
  return float(-std::log(-std::log((double(bits) + 0.5) * 0x1p-32)));
}

}  // namespace outrider
