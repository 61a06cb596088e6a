// Portable vectors of four floats in the compiler's own vector type: SSE2 on any x86-64, NEON on arm64.
//
// Every cpu/isa/<isa>.h defines the same names (see docs/adding_an_op.md):
//   kLanes, VecF (float32 lanes with + - * /), Mask, PairBF16 (2 * kLanes bfloat16, as pairs)
//   set1, load, load_n, store, store_n, fma, max, min, sqrt, abs, round_nearest, pow2i, gt, ge, select, bits,
//   count, reduce_add, reduce_max, load_pairs, load_pairs_n, set1_pair, even_of_pairs, odd_of_pairs, dot_pairs,
//   kHasPairDots; kMaxRows, kMaxPairRows, panels_of(rows, are_pairs): the tile of a matrix product that fits
//   the registers, the second for weights in pairs that must be unpacked (kernels/gemm.h)
#pragma once

#include "cpu/isa/convert.h"

namespace ascend_vllm {
namespace {

constexpr int kLanes = 4;
// Registers: 16 (SSE2).
constexpr int kMaxRows = 2, kMaxPairRows = 2;
constexpr int panels_of(int, bool) { return 1; }
typedef float VecF __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
constexpr bool kHasPairDots = false;  // dot_pairs takes several instructions
typedef uint32_t PairBF16 __attribute__((vector_size(16)));

inline VecF set1(float x) { return VecF{x, x, x, x}; }
inline VecF load(const float* p) {
  VecF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
inline VecF load(const T* p) {
  return VecF{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
// The first n < kLanes elements, zeros after them.
template <class T>
inline VecF load_n(const T* p, int n) {
  VecF v = set1(0.0f);
  for (int i = 0; i < n; ++i) v[i] = to_float(p[i]);
  return v;
}
template <class T>
inline void store_n(T* p, VecF v, int n) {
  for (int i = 0; i < n; ++i) p[i] = from_float<T>(v[i]);
}
inline void store(float* p, VecF v) { std::memcpy(p, &v, sizeof v); }
template <class T>
inline void store(T* p, VecF v) {
  store_n(p, v, kLanes);
}

// a * b + c
inline VecF fma(VecF a, VecF b, VecF c) { return a * b + c; }
inline Mask gt(VecF a, VecF b) { return a > b; }
inline Mask ge(VecF a, VecF b) { return a >= b; }
inline VecF select(Mask mask, VecF yes, VecF no) { return mask ? yes : no; }
// Lane i of the mask as bit i.
inline unsigned bits(Mask mask) { return (mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8); }
inline int count(Mask mask) { return -(mask[0] + mask[1] + mask[2] + mask[3]); }
inline VecF max(VecF a, VecF b) { return a > b ? a : b; }
inline VecF min(VecF a, VecF b) { return a < b ? a : b; }
inline VecF sqrt(VecF a) {
  return VecF{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]), __builtin_sqrtf(a[3])};
}
inline VecF abs(VecF a) { return (VecF)((Mask)a & 0x7fffffff); }
// To the nearest integer, for |a| < 2^22.
inline VecF round_nearest(VecF a) {
  const VecF magic = set1(12582912.0f);  // 1.5 * 2^23: the sum has no fraction bits left
  const VecF shifted = a + magic;
  return shifted - magic;
}
// 2^n for integral lanes in [-126, 127].
inline VecF pow2i(VecF n) { return (VecF)((__builtin_convertvector(n, Mask) + 127) << 23); }
inline float reduce_add(VecF a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float reduce_max(VecF a) {
  const float low = a[0] > a[1] ? a[0] : a[1];
  const float high = a[2] > a[3] ? a[2] : a[3];
  return low > high ? low : high;
}

inline PairBF16 load_pairs(const bfloat16* p) {
  PairBF16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// The first n < 2 * kLanes elements, zeros after them.
inline PairBF16 load_pairs_n(const bfloat16* p, int n) {
  PairBF16 v = {};
  std::memcpy(&v, p, n * sizeof *p);
  return v;
}
// The pair at p in every lane.
inline PairBF16 set1_pair(const bfloat16* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return PairBF16{bits, bits, bits, bits};
}
// The first (second) elements of the pairs, widened.
inline VecF even_of_pairs(PairBF16 a) { return (VecF)(a << 16); }
inline VecF odd_of_pairs(PairBF16 a) { return (VecF)(a & 0xffff0000u); }
// acc[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
inline VecF dot_pairs(VecF acc, PairBF16 a, PairBF16 b) {
  acc += (VecF)(a << 16) * (VecF)(b << 16);
  acc += (VecF)(a & 0xffff0000u) * (VecF)(b & 0xffff0000u);
  return acc;
}

}  // namespace
}  // namespace ascend_vllm
