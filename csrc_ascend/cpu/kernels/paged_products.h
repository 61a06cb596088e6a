// The two matrix products of attention with vector lanes along query rows: scores = keys . queries, out +=
// values * weights. Keys and values are broadcast; the kinds below define the element types and the layouts of
// a panel.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/kernels/paged_panels.h"
// after the former
#include "cpu/kernels/paged_transpose.h"

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

// A weight of the softmax: of those that become bfloat16 exp2_coarse is accurate enough.
template <class Kind>
inline VecF weight_of(VecF t) {
#ifdef __AVX512F__
  if constexpr (Kind::kPaired == 2) return exp2_coarse(t);
#endif
  return exp2_negative(t);
}

template <class Vector, int... kAt>
inline void interleave_vectors(Vector first, Vector second, bfloat16* to, std::integer_sequence<int, kAt...>) {
  constexpr int kCount = sizeof...(kAt);
#if defined(__clang__) || __GNUC__ >= 12
  const Vector low = __builtin_shufflevector(first, second, (kAt / 2 + kAt % 2 * kCount)...);
  const Vector high = __builtin_shufflevector(first, second, ((kAt + kCount) / 2 + kAt % 2 * kCount)...);
#else
  const Vector low = __builtin_shuffle(first, second, Vector{(kAt / 2 + kAt % 2 * kCount)...});
  const Vector high = __builtin_shuffle(first, second, Vector{((kAt + kCount) / 2 + kAt % 2 * kCount)...});
#endif
  __builtin_memcpy(to, &low, sizeof low);
  __builtin_memcpy(to + kCount, &high, sizeof high);
}

// to[2 i] = first[i], to[2 i + 1] = second[i] for kCount elements; GCC does not make such instructions of a
// loop.
template <int kCount>
inline void interleave(const bfloat16* first, const bfloat16* second, bfloat16* to) {
  typedef uint16_t Vector __attribute__((vector_size(2 * kCount)));
  Vector a, b;
  __builtin_memcpy(&a, first, sizeof a);
  __builtin_memcpy(&b, second, sizeof b);
  interleave_vectors(a, b, to, std::make_integer_sequence<int, kCount>{});
}

// to[size, 2] = two rows.
inline void pair_rows(const bfloat16* first, const bfloat16* second, int64_t size, bfloat16* to) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= size; d += 2 * kLanes) interleave<2 * kLanes>(first + d, second + d, to + 2 * d);
  for (; d < size; ++d) {
    to[2 * d] = first[d];
    to[2 * d + 1] = second[d];
  }
}

// Rounds two vectors and interleaves their lanes.
inline void store_pairs(bfloat16* p, VecF first, VecF second) {
  alignas(64) bfloat16 rounded[2 * kLanes];
  store(rounded, first);
  store(rounded + kLanes, second);
  interleave<kLanes>(rounded, rounded + kLanes, p);
}

// Writes rows of queries as a panel [size / kPaired, kWidth, kPaired]; row(lane) is the first element of one of
// them. Lanes from `used` on are zero.
template <class Kind, int kWidth, class RowOf>
inline void load_panel(const RowOf& row, int64_t used, int64_t size, typename Kind::Query* panel) {
  using Query = typename Kind::Query;
  using T = std::remove_cvref_t<decltype(*row(0))>;
  constexpr int64_t kPaired = Kind::kPaired;
  int64_t whole = 0;
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, Query>) {
    constexpr int64_t kNumbers = 16 / sizeof(T);  // of a row at a time
    alignas(16) static constexpr T kZeros[kNumbers] = {};
    whole = round_down(size, kNumbers);
    for (int64_t lane = 0; lane < kWidth; lane += kLanes) {
      const T* from[kLanes];
      for (int64_t k = 0; k < kLanes; ++k) from[k] = lane + k < used ? row(lane + k) : nullptr;
      for (int64_t d = 0; d < whole; d += kNumbers) {
        transpose_singles([&](int k) { return from[k] == nullptr ? kZeros : from[k] + d; },
                          [&](int i, __m512i lanes) {
                            _mm512_storeu_si512(panel + (d + i * kPaired) * kWidth + lane * kPaired, lanes);
                          });
      }
    }
  }
#endif
  for (int64_t lane = 0; lane < kWidth; ++lane) {
    const T* from = lane < used ? row(lane) : nullptr;
    for (int64_t d = whole; d < size; ++d) {
      Query number{};
      if constexpr (std::is_same_v<T, Query>) {
        if (from != nullptr) number = from[d];
      } else {
        if (from != nullptr) number = to_float(from[d]);
      }
      panel[d / kPaired * kPaired * kWidth + lane * kPaired + d % kPaired] = number;
    }
  }
}

// Calls put(lane, depth, numbers, n) for all n <= kLanes numbers of the rows that are lanes of a panel
// [size, kWidth].
template <int kWidth, class Put>
inline void for_panel_rows(const float* panel, int64_t used, int64_t size, const Put& put) {
  int64_t whole = 0;
#ifdef __AVX512F__
  whole = round_down(size, kLanes);
  for (int64_t d = 0; d < whole; d += kLanes) {
    for (int64_t lane = 0; lane < used; lane += 4) {
      transpose_singles([&](int k) { return panel + (d + k) * kWidth + lane; },
                        [&](int i, __m512i numbers) {
                          if (lane + i < used) put(lane + i, d, _mm512_castsi512_ps(numbers), kLanes);
                        });
    }
  }
#endif
  constexpr int64_t kPart = 64;  // depths that stay in the L1 cache for all lanes
  for (int64_t begin = whole; begin < size; begin += kPart) {
    for (int64_t lane = 0; lane < used; ++lane) {
      for (int64_t d = begin; d < min_of(begin + kPart, size); d += kLanes) {
        float numbers[kLanes] = {};
        const int n = static_cast<int>(min_of(kLanes, size - d));
        for (int k = 0; k < n; ++k) numbers[k] = panel[(d + k) * kWidth + lane];
        put(lane, d, load(numbers), n);
      }
    }
  }
}

}  // namespace
}  // namespace ascend_vllm
