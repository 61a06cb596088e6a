// Rows of logits are divided into blocks, whose maxima show which blocks must be searched. Shared by kernels;
// include after cpu/isa/math.h.
#pragma once

#include <cstdint>

namespace ascend_vllm {
namespace {

constexpr int64_t kBlock = 256;  // logits of a block
const float kInfinity = __builtin_inff();

// The largest of n logits that are not NaN, -inf if there are none.
template <class T>
inline float max_of(const T* x, int64_t n) {
  VecF best = set1(-kInfinity);
  float tail = -kInfinity;
  for_lanes(
      n, [&](int64_t i) { best = max(load(x + i), best); },
      [&](int64_t i, int rest) {
        for (int j = 0; j < rest; ++j) tail = to_float(x[i + j]) > tail ? to_float(x[i + j]) : tail;
      });
  const float whole = reduce_max(best);
  return whole > tail ? whole : tail;
}

}  // namespace
}  // namespace ascend_vllm
