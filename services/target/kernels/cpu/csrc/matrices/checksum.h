// A checksum of packed weights, as fast as memory: it finds torn and damaged files, not forged ones.
#pragma once

#include <cstdint>
#include <cstring>

namespace outrider {

// Each word is mixed into one of eight sums by a function that is invertible for a given word, so a change of one word
// always changes the checksum.
inline uint64_t checksum(const char* from, int64_t bytes) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;
  constexpr int kSums = 8;
  uint64_t sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = uint64_t(bytes) + uint64_t(i);
  auto mix = [](uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * kFactor;
    return sum << 29 | sum >> 35;
  };
  int64_t at = 0;
  for (; at + 8 * kSums <= bytes; at += 8 * kSums) {
    uint64_t words[kSums];
    std::memcpy(words, from + at, sizeof words);
    for (int i = 0; i < kSums; ++i) sums[i] = mix(sums[i], words[i]);
  }
  for (; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, from + at, size_t(bytes - at < 8 ? bytes - at : 8));
    sums[0] = mix(sums[0], word);
  }
  uint64_t all = 0;
  for (uint64_t sum : sums) all = mix(all, sum);
  return all;
}

}  // namespace outrider
