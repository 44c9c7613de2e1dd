// Copies of KV-cache rows between slots.
#pragma once

#include <cstdint>
#include <cstring>

namespace outrider {

// Copies the same slots in every pool, in order. row_bytes: [count], row size of each pool
inline void move_rows(char* const* pools, const int64_t* row_bytes, int64_t count, const int64_t* sources,
                      const int64_t* destinations, int64_t moves) {
  for (int64_t pool = 0; pool < count; ++pool) {
    const int64_t bytes = row_bytes[pool];
    for (int64_t i = 0; i < moves; ++i) {
      std::memmove(pools[pool] + destinations[i] * bytes, pools[pool] + sources[i] * bytes, bytes);
    }
  }
}

}  // namespace outrider
