// There are no dot products of bfloat16: its numbers are multiplied as float32. Included by keys.h.
#pragma once

namespace outrider {

// What numbers of T are multiplied as.
template <class T>
using Computed = float;

}  // namespace outrider
