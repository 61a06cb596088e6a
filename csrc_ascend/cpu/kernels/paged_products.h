// The two matrix products of attention with vector lanes along query rows: scores = keys . queries, out +=
// values * weights. Keys and values are broadcast; the kinds below define the element types and the layouts of
// a panel.
#pragma once

#include "cpu/kernels/paged_panels.h"

namespace ascend_vllm {
namespace {

// float32; narrower keys and values are converted first. Queries [D, lanes], weights [keys, lanes], values
// [keys, D].
struct Singles {
  using Key = float;
  using Query = float;
  using Lanes = VecF;
  static constexpr int kPaired = 1;  // adjacent depths of queries, and keys of weights and values

  static VecF lanes(const float* p) { return load(p); }
  static VecF broadcast(const float* p) { return set1(*p); }
  static VecF multiply_add(VecF acc, VecF a, VecF b) { return fma(a, b, acc); }
};

// bfloat16 with an instruction for pairs. Queries [D / 2, lanes, 2], weights [keys / 2, lanes, 2] rounded to
// bfloat16, values [keys / 2, D, 2].
struct Pairs {
  using Key = bfloat16;
  using Query = bfloat16;
  using Lanes = PairBF16;
  static constexpr int kPaired = 2;

  static PairBF16 lanes(const bfloat16* p) { return load_pairs(p); }
  static PairBF16 broadcast(const bfloat16* p) { return set1_pair(p); }
  static VecF multiply_add(VecF acc, PairBF16 a, PairBF16 b) { return dot_pairs(acc, a, b); }
};

template <class T>
using KindOf = std::conditional_t<kPairsArePreferred && std::is_same_v<T, bfloat16>, Pairs, Singles>;

// scores[k, lanes] = scale * keys[k] . queries for kCount keys [kCount, size] and kVecs vectors of queries.
template <class Kind, int kCount, int kVecs>
inline void score_keys(const typename Kind::Key* keys, const typename Kind::Query* queries, int64_t size,
                       VecF scale, float* scores) {
  VecF acc[kCount][kVecs];
  for (auto& of_key : acc) {
    for (VecF& sum : of_key) sum = set1(0.0f);
  }
  for (int64_t d = 0; d < size; d += Kind::kPaired) {
    typename Kind::Lanes query[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) query[v] = Kind::lanes(queries + (d * kVecs + v * Kind::kPaired) * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) {
      const auto key = Kind::broadcast(keys + k * size + d);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[k][v] = Kind::multiply_add(acc[k][v], key, query[v]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kCount; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(scores + (k * kVecs + v) * kLanes, acc[k][v] * scale);
  }
}

// out[r, lanes] = out * rescale + sum over keys n of values[n, r] * weights[n, lanes] for kCount depths r from
// `depth` and keys begin … end-1 of the tile; begin is a multiple of Kind::kPaired.
template <class Kind, int kCount, int kVecs>
inline void add_values(const TileRows<typename Kind::Key>& values, const typename Kind::Query* weights,
                       int64_t begin, int64_t end, int64_t depth, const float* rescale, float* out) {
  VecF acc[kCount][kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    const VecF factor = load(rescale + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) acc[r][v] = load(out + (r * kVecs + v) * kLanes) * factor;
  }
  for (int64_t n = begin; n < end;) {
    const int64_t run_end = min_of(end, values.run_end(n));
    const typename Kind::Key* row = values.at(n) + depth * Kind::kPaired;
    for (; n < run_end; n += Kind::kPaired, row += values.size * Kind::kPaired) {
      typename Kind::Lanes weight[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v)
        weight[v] = Kind::lanes(weights + (n * kVecs + v * Kind::kPaired) * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; ++r) {
        const auto value = Kind::broadcast(row + r * Kind::kPaired);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) acc[r][v] = Kind::multiply_add(acc[r][v], value, weight[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(out + (r * kVecs + v) * kLanes, acc[r][v]);
  }
}

#ifdef __AVX512F__
// Indices for permutations of 16-bit lanes: first, first + behind, first + 1, first + 1 + behind, …
inline __m512i alternating_halves(int first, int behind) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i even = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
  return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(behind)), 16));
}
#endif

// Rounds two vectors and interleaves their lanes.
inline void store_pairs(bfloat16* p, VecF first, VecF second) {
#ifdef __AVX512BF16__
  const auto rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(alternating_halves(0, kLanes), rounded));
#else
  bfloat16 rounded[2][kLanes];
  store(rounded[0], first);
  store(rounded[1], second);
  for (int i = 0; i < kLanes; ++i) {
    p[2 * i] = rounded[0][i];
    p[2 * i + 1] = rounded[1][i];
  }
#endif
}

}  // namespace
}  // namespace ascend_vllm
