// Functions of float lanes built on the primitives of an instruction set; include after cpu/isa/<isa>.h.
#pragma once

namespace ascend_vllm {
namespace {

// e^x within two units in the last place; 0 below -87.34, infinity above 88.72, NaN for NaN.
// Cody-Waite reduction x = n ln 2 + r, |r| <= ln 2 / 2, then e^r by its Taylor polynomial of degree 7.
inline VecF exp(VecF x) {
  const VecF n = round_nearest(min(max(x * set1(1.44269504088896341f), set1(-126.0f)), set1(127.0f)));
  VecF r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  VecF p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  VecF y = p * pow2i(n);
  y = select(gt(x, set1(88.72f)), set1(__builtin_inff()), y);
  return select(gt(set1(-87.33f), x), set1(0.0f), y);
}

// erfc(z) for z >= 0 with a relative error of about 1.2e-7: the Chebyshev fit of Press et al., "Numerical
// Recipes", section 6.2.
inline VecF erfc_positive(VecF z) {
  constexpr float kFit[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                            -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const VecF t = set1(1.0f) / fma(z, set1(0.5f), set1(1.0f));
  VecF p = set1(kFit[0]);
  for (int i = 1; i < 10; ++i) p = fma(p, t, set1(kFit[i]));
  return t * exp(p - z * z);
}

// Applies body(offset, count) to [0, n) in whole vectors and one tail: the count is kLanes except the last.
template <class Full, class Tail>
inline void for_lanes(int64_t n, const Full& full, const Tail& tail) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) full(i);
  if (i < n) tail(i, static_cast<int>(n - i));
}

// The dot product of n elements, accumulated in float32.
template <class T>
inline float dot(const T* a, const T* b, int64_t n) {
  VecF acc0 = set1(0.0f), acc1 = set1(0.0f);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    acc0 = fma(load(a + i), load(b + i), acc0);
    acc1 = fma(load(a + i + kLanes), load(b + i + kLanes), acc1);
  }
  if (i + kLanes <= n) {
    acc0 = fma(load(a + i), load(b + i), acc0);
    i += kLanes;
  }
  if (i < n) acc1 = fma(load_n(a + i, static_cast<int>(n - i)), load_n(b + i, static_cast<int>(n - i)), acc1);
  return reduce_add(acc0 + acc1);
}
inline float dot(const bfloat16* a, const bfloat16* b, int64_t n) {
  constexpr int kStep = 2 * kLanes;
  VecF acc0 = set1(0.0f), acc1 = set1(0.0f);
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    acc0 = dot_pairs(acc0, load_pairs(a + i), load_pairs(b + i));
    acc1 = dot_pairs(acc1, load_pairs(a + i + kStep), load_pairs(b + i + kStep));
  }
  if (i + kStep <= n) {
    acc0 = dot_pairs(acc0, load_pairs(a + i), load_pairs(b + i));
    i += kStep;
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    acc1 = dot_pairs(acc1, load_pairs_n(a + i, rest), load_pairs_n(b + i, rest));
  }
  return reduce_add(acc0 + acc1);
}

}  // namespace
}  // namespace ascend_vllm
