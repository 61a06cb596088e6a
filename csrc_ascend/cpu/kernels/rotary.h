// Rotary position embedding, in place on strided query and key rows.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct RotaryArgs {
  DType dtype;
  const int64_t* positions;  // [tokens]
  void* rows[2];             // query and key; row t starts at t * strides[i] elements
  int64_t strides[2];
  int64_t heads[2];
  const float* cos_sin;  // [positions, rot_dim]: cosines, then sines
  int64_t tokens, head_size, rot_dim;
  bool is_neox;
};

ASCEND_VLLM_KERNEL(rotary_embedding, RotaryArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

// Pairs (j, j + half) of one head.
template <class T>
inline void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
  for_lanes(
      half,
      [&](int64_t j) {
        const VecF a = load(x + j), b = load(x + half + j), c = load(cos + j), s = load(sin + j);
        store(x + j, a * c - b * s);
        store(x + half + j, b * c + a * s);
      },
      [&](int64_t j, int rest) {
        const VecF a = load_n(x + j, rest), b = load_n(x + half + j, rest);
        const VecF c = load_n(cos + j, rest), s = load_n(sin + j, rest);
        store_n(x + j, a * c - b * s, rest);
        store_n(x + half + j, b * c + a * s, rest);
      });
}

// Pairs (2j, 2j + 1) of one head, by way of a float32 copy so that the compiler can shuffle.
template <class T>
inline void rotate_neighbours(T* x, const float* cos, const float* sin, int64_t half) {
  constexpr int64_t kChunk = 64;
  alignas(64) float values[2 * kChunk];
  for (int64_t start = 0; start < half; start += kChunk) {
    const int64_t pairs = half - start < kChunk ? half - start : kChunk;
    T* part = x + 2 * start;
    for_lanes(
        2 * pairs, [&](int64_t i) { store(values + i, load(part + i)); },
        [&](int64_t i, int rest) { store_n(values + i, load_n(part + i, rest), rest); });
    for (int64_t j = 0; j < pairs; ++j) {
      const float a = values[2 * j], b = values[2 * j + 1];
      values[2 * j] = a * cos[start + j] - b * sin[start + j];
      values[2 * j + 1] = b * cos[start + j] + a * sin[start + j];
    }
    for_lanes(
        2 * pairs, [&](int64_t i) { store(part + i, load(values + i)); },
        [&](int64_t i, int rest) { store_n(part + i, load_n(values + i, rest), rest); });
  }
}

template <class T>
void rotary_embedding(const RotaryArgs& a) {
  const int64_t half = a.rot_dim / 2;
  parallel_for(a.tokens, 2 * (a.heads[0] + a.heads[1]) * a.rot_dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos = a.cos_sin + a.positions[t] * a.rot_dim;
      const float* sin = cos + half;
      for (int which = 0; which < 2; ++which) {
        T* row = static_cast<T*>(a.rows[which]) + t * a.strides[which];
        for (int64_t h = 0; h < a.heads[which]; ++h) {
          if (a.is_neox) {
            rotate_halves(row + h * a.head_size, cos, sin, half);
          } else {
            rotate_neighbours(row + h * a.head_size, cos, sin, half);
          }
        }
      }
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(rotary_embedding, RotaryArgs) {
  with_dtype(args.dtype, [&](auto tag) { rotary_embedding<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
