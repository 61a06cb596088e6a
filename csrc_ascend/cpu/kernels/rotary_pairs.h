// Rotation of the pairs of one head, shared by kernels; include after cpu/isa/math.h.
#pragma once

#include <cstdint>

namespace ascend_vllm {
namespace {

// Pairs (j, j + half) of one head. `to` may be `x`.
template <class T>
inline void rotate_halves(T* to, const T* x, const float* cos, const float* sin, int64_t half) {
  for_lanes(
      half,
      [&](int64_t j) {
        const VecF a = load(x + j), b = load(x + half + j), c = load(cos + j), s = load(sin + j);
        store(to + j, a * c - b * s);
        store(to + half + j, b * c + a * s);
      },
      [&](int64_t j, int rest) {
        const VecF a = load_n(x + j, rest), b = load_n(x + half + j, rest);
        const VecF c = load_n(cos + j, rest), s = load_n(sin + j, rest);
        store_n(to + j, a * c - b * s, rest);
        store_n(to + half + j, b * c + a * s, rest);
      });
}

// Pairs (2j, 2j + 1) of one head, with a float32 copy that lets the compiler vectorise. `to` may be `x`.
template <class T>
inline void rotate_neighbours(T* to, const T* x, const float* cos, const float* sin, int64_t half) {
  constexpr int64_t kChunk = 64;
  alignas(64) float values[2 * kChunk];
  for (int64_t start = 0; start < half; start += kChunk) {
    const int64_t pairs = half - start < kChunk ? half - start : kChunk;
    const T* part = x + 2 * start;
    T* turned = to + 2 * start;
    for_lanes(
        2 * pairs, [&](int64_t i) { store(values + i, load(part + i)); },
        [&](int64_t i, int rest) { store_n(values + i, load_n(part + i, rest), rest); });
    for (int64_t j = 0; j < pairs; ++j) {
      const float a = values[2 * j], b = values[2 * j + 1];
      values[2 * j] = a * cos[start + j] - b * sin[start + j];
      values[2 * j + 1] = b * cos[start + j] + a * sin[start + j];
    }
    for_lanes(
        2 * pairs, [&](int64_t i) { store(turned + i, load(values + i)); },
        [&](int64_t i, int rest) { store_n(turned + i, load_n(values + i, rest), rest); });
  }
}

// All pairs of a head. cos_sin: `half` cosines, then as many sines. `to` may be `x`.
template <class T>
inline void rotate_pairs(T* to, const T* x, const float* cos_sin, int64_t half, bool is_neox) {
  if (is_neox) {
    rotate_halves(to, x, cos_sin, cos_sin + half, half);
  } else {
    rotate_neighbours(to, x, cos_sin, cos_sin + half, half);
  }
}

}  // namespace
}  // namespace ascend_vllm
