// Selection in an unsorted array of floats, in expected linear time (Hoare's quickselect). Shared by kernels.
#pragma once

#include <stdlib.h>

#include <cstdint>

namespace ascend_vllm {
namespace {

// A growing array; kernels have no standard containers (see docs/adding_an_op.md).
struct Floats {
  float* data;
  int64_t size, capacity;

  void reserve(int64_t wanted) {
    if (wanted <= capacity) return;
    capacity = wanted > 2 * capacity ? wanted : 2 * capacity;
    data = static_cast<float*>(realloc(data, capacity * sizeof(float)));
    if (data == nullptr) abort();
  }
  void release() {
    free(data);
    *this = Floats{};
  }
};

inline void swap(float& a, float& b) {
  const float old = a;
  a = b;
  b = old;
}

inline float median_of_three(float a, float b, float c) {
  if (a > b) swap(a, b);
  if (b > c) b = c;
  return a > b ? a : b;
}

// Partitions x so that [0, greater) > pivot, [greater, smaller) == pivot and [smaller, n) < pivot.
inline void partition(float* x, int64_t n, float pivot, int64_t& greater, int64_t& smaller) {
  greater = 0;
  smaller = n;
  for (int64_t i = 0; i < smaller;) {
    if (x[i] > pivot) {
      swap(x[i++], x[greater++]);
    } else if (x[i] < pivot) {
      swap(x[i], x[--smaller]);
    } else {
      ++i;
    }
  }
}

// The k-th largest of n >= k >= 1 values; reorders them.
inline float select_largest(float* x, int64_t n, int64_t k) {
  for (;;) {
    if (n == 1) return x[0];
    const float pivot = median_of_three(x[0], x[n / 2], x[n - 1]);
    int64_t greater, smaller;
    partition(x, n, pivot, greater, smaller);
    if (k <= greater) {
      n = greater;
    } else if (k <= smaller) {
      return pivot;
    } else {
      x += smaller;
      n -= smaller;
      k -= smaller;
    }
  }
}

// The smallest of n >= 1 values for which the values greater than it weigh less than `mass`; the largest value
// if mass <= 0. weigh(part, count) returns the weight of a part. Reorders the values.
template <class Weigh>
inline float select_by_mass(float* x, int64_t n, double mass, const Weigh& weigh) {
  double above = 0.0;  // weight of the values known to be greater than all of x[0, n)
  float found = x[0];
  for (int64_t i = 1; i < n; ++i) found = x[i] > found ? x[i] : found;
  while (n > 0) {
    const float pivot = median_of_three(x[0], x[n / 2], x[n - 1]);
    int64_t greater, smaller;
    partition(x, n, pivot, greater, smaller);
    const double pivot_above = above + weigh(x, greater);
    if (pivot_above < mass) {
      // the pivot is kept, and perhaps smaller ones
      found = pivot < found ? pivot : found;
      above = pivot_above + weigh(x + greater, smaller - greater);
      x += smaller;
      n -= smaller;
    } else {
      n = greater;
    }
  }
  return found;
}

}  // namespace
}  // namespace ascend_vllm
