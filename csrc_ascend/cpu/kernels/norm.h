// RMSNorm, RMSNorm fused with the residual addition, and LayerNorm over the last dimension.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct NormArgs {
  DType dtype;
  const void* x;         // row (o, i) starts at o * outer_stride + i * inner_stride elements
  void* out;             // contiguous rows
  const void* weight;    // [hidden]; LayerNorm: may be null
  const void* bias;      // [hidden] or null; LayerNorm only
  int64_t outer, inner;  // numbers of rows: outer * inner
  int64_t outer_stride, inner_stride;
  int64_t hidden;
  float epsilon;
};

struct FusedAddRmsNormArgs {
  DType dtype;
  void* x;             // in: the addend; out: the normalised sum
  void* residual;      // in and out: the running sum
  const void* weight;  // [hidden]
  int64_t rows, x_stride, residual_stride, hidden;
  float epsilon;
};

ASCEND_VLLM_KERNEL(rms_norm, NormArgs)
ASCEND_VLLM_KERNEL(layer_norm, NormArgs)
ASCEND_VLLM_KERNEL(fused_add_rms_norm, FusedAddRmsNormArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/kernels/rms_row.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

template <class T, class Row>
inline void for_rows(const NormArgs& a, const Row& row) {
  const T* x = static_cast<const T*>(a.x);
  T* out = static_cast<T*>(a.out);
  parallel_for(a.outer * a.inner, 2 * a.hidden, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      row(x + r / a.inner * a.outer_stride + r % a.inner * a.inner_stride, out + r * a.hidden);
    }
  });
}

template <class T>
void rms_norm(const NormArgs& a) {
  const T* weight = static_cast<const T*>(a.weight);
  for_rows<T>(a, [&](const T* x, T* out) {
    scale_row(x, out, weight, inverse_rms(sum_of_squares(x, a.hidden), a.hidden, a.epsilon), a.hidden);
  });
}

template <class T>
void fused_add_rms_norm(const FusedAddRmsNormArgs& a) {
  const T* weight = static_cast<const T*>(a.weight);
  parallel_for(a.rows, 3 * a.hidden, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* x = static_cast<T*>(a.x) + r * a.x_stride;
      T* residual = static_cast<T*>(a.residual) + r * a.residual_stride;
      VecF squares = set1(0.0f);
      // the rounded sum is normalised, since that is the residual of the next layer
      for_lanes(
          a.hidden,
          [&](int64_t i) {
            store(residual + i, load(residual + i) + load(x + i));
            const VecF sum = load(residual + i);
            squares = fma(sum, sum, squares);
          },
          [&](int64_t i, int rest) {
            store_n(residual + i, load_n(residual + i, rest) + load_n(x + i, rest), rest);
            const VecF sum = load_n(residual + i, rest);
            squares = fma(sum, sum, squares);
          });
      scale_row(residual, x, weight, inverse_rms(reduce_add(squares), a.hidden, a.epsilon), a.hidden);
    }
  });
}

template <class T>
inline void layer_norm_row(const NormArgs& a, const T* x, T* out) {
  const T* weight = static_cast<const T*>(a.weight);
  const T* bias = static_cast<const T*>(a.bias);
  VecF sums = set1(0.0f);
  for_lanes(
      a.hidden, [&](int64_t i) { sums = sums + load(x + i); },
      [&](int64_t i, int rest) { sums = sums + load_n(x + i, rest); });
  const float mean = reduce_add(sums) / static_cast<float>(a.hidden);
  // a second pass over the deviations, since the one-pass formula cancels when the mean is large
  const VecF center = set1(mean);
  VecF squares = set1(0.0f);
  float tail_squares = 0.0f;
  for_lanes(
      a.hidden,
      [&](int64_t i) {
        const VecF d = load(x + i) - center;
        squares = fma(d, d, squares);
      },
      [&](int64_t i, int rest) {
        for (int j = 0; j < rest; ++j) {
          const float d = to_float(x[i + j]) - mean;
          tail_squares += d * d;
        }
      });
  const VecF scale = set1(inverse_rms(reduce_add(squares) + tail_squares, a.hidden, a.epsilon));
  const auto normalised = [&](VecF value, int64_t i, auto&& load_part) {
    VecF y = (value - center) * scale;
    if (weight != nullptr) y = y * load_part(weight + i);
    return bias != nullptr ? y + load_part(bias + i) : y;
  };
  for_lanes(
      a.hidden,
      [&](int64_t i) { store(out + i, normalised(load(x + i), i, [](const T* p) { return load(p); })); },
      [&](int64_t i, int rest) {
        const VecF y = normalised(load_n(x + i, rest), i, [rest](const T* p) { return load_n(p, rest); });
        store_n(out + i, y, rest);
      });
}

template <class T>
void layer_norm(const NormArgs& a) {
  for_rows<T>(a, [&](const T* x, T* out) { layer_norm_row(a, x, out); });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(rms_norm, NormArgs) {
  with_dtype(args.dtype, [&](auto tag) { rms_norm<decltype(tag)>(args); });
}
ASCEND_VLLM_DEFINE_KERNEL(layer_norm, NormArgs) {
  with_dtype(args.dtype, [&](auto tag) { layer_norm<decltype(tag)>(args); });
}
ASCEND_VLLM_DEFINE_KERNEL(fused_add_rms_norm, FusedAddRmsNormArgs) {
  with_dtype(args.dtype, [&](auto tag) { fused_add_rms_norm<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
