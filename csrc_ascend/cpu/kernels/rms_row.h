// Root-mean-square normalisation of one row, shared by kernels; include after cpu/isa/math.h.
#pragma once

#include <cstdint>

namespace ascend_vllm {
namespace {

template <class T>
inline float sum_of_squares(const T* x, int64_t n) {
  VecF acc0 = set1(0.0f), acc1 = set1(0.0f);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const VecF a = load(x + i), b = load(x + i + kLanes);
    acc0 = fma(a, a, acc0);
    acc1 = fma(b, b, acc1);
  }
  for_lanes(
      n - i, [&](int64_t j) { acc0 = fma(load(x + i + j), load(x + i + j), acc0); },
      [&](int64_t j, int rest) {
        const VecF a = load_n(x + i + j, rest);
        acc1 = fma(a, a, acc1);
      });
  return reduce_add(acc0 + acc1);
}

inline float inverse_rms(float square_sum, int64_t n, float epsilon) {
  return 1.0f / __builtin_sqrtf(square_sum / static_cast<float>(n) + epsilon);
}

// out = x * factor * weight; out may be x.
template <class T>
inline void scale_row(const T* x, T* out, const T* weight, float factor, int64_t n) {
  const VecF scale = set1(factor);
  for_lanes(
      n, [&](int64_t i) { store(out + i, load(x + i) * scale * load(weight + i)); },
      [&](int64_t i, int rest) {
        store_n(out + i, load_n(x + i, rest) * scale * load_n(weight + i, rest), rest);
      });
}

}  // namespace
}  // namespace ascend_vllm
