// Rows of a weight packed by several threads, each of which takes a part of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace outrider {

// part(first, count): packs these rows
template <class Part>
void in_parts(int64_t count, int32_t threads, Part&& part) {
  const int64_t each = std::max<int64_t>(1, (count + threads - 1) / threads);
  std::vector<std::thread> others;
  for (int64_t first = each; first < count; first += each) {
    others.emplace_back([&part, first, rows = std::min(each, count - first)] { part(first, rows); });
  }
  if (count > 0) part(0, std::min(each, count));
  for (std::thread& other : others) other.join();
}

}  // namespace outrider
