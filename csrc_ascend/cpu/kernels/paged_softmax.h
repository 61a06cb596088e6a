// Shared by all attention kernels: element products, the view of one KV head's blocks, and the online softmax
// in powers of two.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "cpu/isa/bytes.h"

namespace ascend_vllm {
namespace {

// Keys of one step of the online softmax; steps begin at multiples of it, whatever the query.
constexpr int kTileKeys = 64;
// The maximum before any visible key: finite, so that the difference of two of them is zero and not NaN.
constexpr float kNoMax = -3.402823466e38f;

constexpr float kLog2E = 1.44269504088896341f;

// bfloat16 is multiplied in pairs if there is an instruction for it. The portable variant does so too, although
// it is slower, so that tests cover this code on machines without BF16 instructions.
constexpr bool kPairsArePreferred = kHasPairDots || kLanes == 4;

// 2^t for t <= 0; exactly 1 at 0, 0 below -126.5, NaN for NaN. Relative error below 1e-7.
// 2^t = 2^n 2^f with n the nearest integer; 2^f = 1 + f q(f), q fitted for the least greatest relative error.
inline VecF exp2_negative(VecF t) {
  t = max(set1(-127.0f), t);  // pow2i(-127) is zero; a NaN as the second operand is kept
  const VecF n = round_nearest(t);
  const VecF f = t - n;
  VecF p = set1(1.326472731307149e-3f);
  p = fma(p, f, set1(9.671512991189957e-3f));
  p = fma(p, f, set1(5.550733581185341e-2f));
  p = fma(p, f, set1(2.4022242426872253e-1f));
  p = fma(p, f, set1(6.931470036506653e-1f));
  p = fma(p, f, set1(1.0f));
  return p * pow2i(n);
}
inline float exp2_negative(float t) {
  float lanes[kLanes];
  store(lanes, exp2_negative(set1(t)));
  return lanes[0];
}

// The blocks of one sequence, of one KV head.
template <class T>
struct HeadBlocks {
  const T* keys;  // of block 0
  const T* values;
  int64_t block_stride;  // elements from a block to the next one
  const int32_t* table;
  int block_shift;  // log2 of the block size
  int64_t head_size;
  const bfloat16* key_scales = nullptr;  // of each key of block 0; null: there are none
  const bfloat16* value_scales = nullptr;
  int64_t scale_stride = 0;  // elements from the scales of a block to those of the next one

  int64_t block_size() const { return int64_t{1} << block_shift; }
  int64_t offset(int64_t position) const {
    return table[position >> block_shift] * block_stride + (position & (block_size() - 1)) * head_size;
  }
  // Of the scale of a key or value.
  int64_t scale_offset(int64_t position) const {
    return table[position >> block_shift] * scale_stride + (position & (block_size() - 1));
  }
  const T* key(int64_t position) const { return keys + offset(position); }
  const T* value(int64_t position) const { return values + offset(position); }

  // Calls body(first, end) for positions begin … end-1 cut where blocks end, so that each part is contiguous.
  template <class Body>
  void for_runs(int64_t begin, int64_t end, const Body& body) const {
    for (int64_t n = begin; n < end;) {
      const int64_t run_end = (n & -block_size()) + block_size();
      const int64_t stop = run_end < end ? run_end : end;
      body(n, stop);
      n = stop;
    }
  }
  // Writes the scales (of keys or values) of positions begin … end-1 to `to`.
  void load_scales(const bfloat16* scales, int64_t begin, int64_t end, float* to) const {
    for_runs(begin, end, [&](int64_t first, int64_t stop) {
      const bfloat16* from = scales + scale_offset(first);
      float* out = to + (first - begin);
      for_lanes(
          stop - first, [&](int64_t i) { store(out + i, load(from + i)); },
          [&](int64_t i, int rest) { store_n(out + i, load_n(from + i, rest), rest); });
    });
  }

  // Prefetches `count` positions of one block, of keys or values, by default into L1 (kLocality is that of
  // __builtin_prefetch). Blocks are scattered, so hardware prefetching does not find the next one. Always
  // inline, since g++ 12 removes calls of a function that only prefetches.
  template <int kLocality = 3>
  [[gnu::always_inline]] void prefetch(const T* cache, int64_t position, int64_t count) const {
    const T* from = cache + offset(position);
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t i = 0; i < count * head_size; i += kLine) __builtin_prefetch(from + i, 0, kLocality);
  }
};

// Query rows of one work item: row i is head i % group of token i / group of the sequence's step.
struct QueryRows {
  int64_t begin, end;
  int64_t group;           // query heads of a KV head
  int64_t first_position;  // of token 0
  int64_t window;          // 0: none
  float soft_cap;          // largest absolute score, scaled by log2 e; 0: none
  const float* slopes;     // of ALiBi, per head of the group; null: none

  bool changes_scores() const { return soft_cap > 0.0f || slopes != nullptr; }
  // Scaled by log2 e, as scores are.
  float slope(int64_t row) const { return slopes == nullptr ? 0.0f : slopes[row % group] * kLog2E; }
  int64_t count() const { return end - begin; }
  int64_t position(int64_t row) const { return first_position + row / group; }
  // Positions visible to a row: seen_from(row) … position(row).
  int64_t seen_from(int64_t row) const {
    const int64_t from = window > 0 ? position(row) - window + 1 : 0;
    return from > 0 ? from : 0;
  }
};

// tanh with an absolute error of about 1e-7, and a relative one near 0; NaN for NaN.
inline VecF tanh(VecF x) {
  const VecF size = abs(x), square = x * x;
  VecF series = fma(set1(62.0f / 2835.0f), square, set1(-17.0f / 315.0f));
  series = fma(series, square, set1(2.0f / 15.0f));
  series = fma(series, square, set1(-1.0f / 3.0f));
  series = fma(series * square, x, x);
  const VecF power = exp(size * set1(-2.0f));
  const VecF large = (set1(1.0f) - power) / (set1(1.0f) + power);
  const VecF signed_large = select(gt(set1(0.0f), x), set1(0.0f) - large, large);
  return select(gt(set1(0.25f), size), series, signed_large);
}

// Scores with the soft cap, c tanh(score / c), and then ALiBi: slope times the distance, key minus query, which
// is never positive for visible keys (Press et al., 2022).
inline VecF changed_scores(VecF scores, float soft_cap, VecF slopes, VecF distance) {
  if (soft_cap > 0.0f) scores = set1(soft_cap) * tanh(scores * set1(1.0f / soft_cap));
  return fma(slopes, distance, scores);
}

// Attention of rows to some of their keys: out [rows, D] is the sum of 2^(score - max) * value, sum that of the
// weights; scores are scaled by log2 e.
struct Part {
  float* out;
  float* max;
  float* sum;

  static constexpr int64_t floats(int64_t rows, int64_t head_size) { return rows * (head_size + 2); }
  static Part at(float* memory, int64_t rows, int64_t head_size) {
    return {memory, memory + rows * head_size, memory + rows * (head_size + 1)};
  }
};

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_down(int64_t a, int64_t step) { return a / step * step; }
constexpr int64_t round_up(int64_t a, int64_t step) { return (a + step - 1) / step * step; }
inline int64_t clamp(int64_t a, int64_t low, int64_t high) { return max_of(low, min_of(a, high)); }

inline void fill(float* p, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) p[i] = value;
}

}  // namespace
}  // namespace ascend_vllm
