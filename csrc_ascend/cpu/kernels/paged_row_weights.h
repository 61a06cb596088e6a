// The softmax of a tile of keys for two to eight query rows with AVX-512: maxima and sums of all rows are in
// one vector, so that no row waits for another.
#pragma once

#ifdef __AVX512F__

#include "cpu/kernels/paged_depth_lanes.h"

namespace ascend_vllm {
namespace {

// Lane i < 8: combine of all lanes of rows[i].
template <class Combine>
[[gnu::always_inline]] inline VecF fold_rows(const VecF (&rows)[8], const Combine& combine) {
  VecF pairs[4], fours[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[i] = combine(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                       _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512d first = _mm512_castps_pd(pairs[2 * i]), second = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
  }
  // a lane of 128 bits has rows 0 … 3 or 4 … 7
  const VecF halves =
      combine(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
  const VecF all = combine(halves, _mm512_shuffle_f32x4(halves, halves, 0xb1));
  return _mm512_shuffle_f32x4(all, all, 0xd8);
}

// T: of the cache.
template <class T>
class RowWeights : protected DepthLanes<T> {
  using Base = DepthLanes<T>;
  static constexpr bool kIsScaled = sizeof(T) == 1;

 protected:
  template <class... Args>
  explicit RowWeights(const Args&... args) : Base(args...) {
    if constexpr (kIsScaled) fill(value_scales_, kTileKeys, 1.0f);  // where they have none
  }
  using Base::blocks_, Base::scores_, Base::value_scales_;

  // Turns the scores of a tile into weights. power(t): 2^t for t <= 0. put(i, n, weights) gets those of row i,
  // keys n … n+15, with the scales of values; before, start(powers) gets those of the greatest scores of the
  // tile, in lane i. Sets rescale_.
  template <int kRows, class Power, class Start, class Put>
  [[gnu::always_inline]] void weigh_rows(int64_t tile, int64_t begin, int64_t end, Part part,
                                         const Power& power, const Start& start, const Put& put) {
    if (Base::sees_all(tile, begin, end)) {
      using First = std::integral_constant<int64_t, 0>;
      using Last = std::integral_constant<int64_t, kTileKeys>;
      return weigh_keys<kRows>(First{}, Last{}, part, power, start, put);
    }
    for (int64_t i = 0; i < kRows; ++i) Base::finish_scores(i, tile, begin, end);
    weigh_keys<kRows>(round_down(begin, kLanes), round_up(end, kLanes), part, power, start, put);
  }

  alignas(64) float rescale_[kLanes];  // of the earlier sums of each row

 private:
  template <int kRows, class First, class Last, class Power, class Start, class Put>
  [[gnu::always_inline]] void weigh_keys(First first, Last last, Part part, const Power& power,
                                         const Start& start, const Put& put) {
    VecF of_rows[8];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const float* scores = scores_ + i * kTileKeys;
      VecF top = load(scores + first);
#pragma GCC unroll 4
      for (int64_t n = first + kLanes; n < last; n += kLanes) top = max(top, load(scores + n));
      of_rows[i] = top;
    }
#pragma GCC unroll 8
    for (int i = kRows; i < 8; ++i) of_rows[i] = of_rows[0];
    const VecF tops = fold_rows(of_rows, [](VecF a, VecF b) { return max(a, b); });
    const VecF before = load_n(part.max, kRows), greatest = max(before, tops);
    const VecF rescale = exp2_negative(before - greatest);
    start(exp2_negative(tops - greatest));
    alignas(64) float shifts[kLanes];
    store(shifts, greatest);
    store_n(part.max, greatest, kRows);
    store(rescale_, rescale);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const float* scores = scores_ + i * kTileKeys;
      const VecF shift = set1(shifts[i]);
      VecF sum = set1(0.0f);
#pragma GCC unroll 4
      for (int64_t n = first; n < last; n += kLanes) {
        VecF weight = power(load(scores + n) - shift);
        sum = sum + weight;
        if constexpr (kIsScaled) weight = weight * load(value_scales_ + n);
        put(i, n, weight);
      }
      of_rows[i] = sum;
    }
#pragma GCC unroll 8
    for (int i = kRows; i < 8; ++i) of_rows[i] = of_rows[0];
    const VecF sums = fold_rows(of_rows, [](VecF a, VecF b) { return a + b; });
    store_n(part.sum, fma(load_n(part.sum, kRows), rescale, sums), kRows);
  }
};

}  // namespace
}  // namespace ascend_vllm

#endif
