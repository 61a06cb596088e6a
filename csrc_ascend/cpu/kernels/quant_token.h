// Rounding of a row to 8 bits, see quantize_tokens and quantize_static of ops/quantized_gemm.py.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

enum class TokenScale : int32_t { kSymmetric, kOffset, kStatic };

struct QuantizeTokensArgs {
  DType dtype;
  const void* x;  // row t starts at t * x_stride elements
  int8_t* q;      // [rows, in_features]
  float* scales;  // [rows]
  int32_t* offsets;
  int64_t rows, x_stride, in_features;
  TokenScale kind;
  float static_scale;
  int32_t static_offset;
};

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/isa/integers.h"

namespace ascend_vllm {
namespace {

// Writes a row's scale and offset.
template <class T>
inline void choose_scale(const QuantizeTokensArgs& a, const T* x, float* scale, int32_t* offset) {
  *offset = 0;
  if (a.kind == TokenScale::kStatic) {
    *scale = a.static_scale;
    *offset = a.static_offset;
    return;
  }
  // zero, which for_lanes' tail pads with, belongs to the range
  VecF high = set1(0.0f), minus_low = set1(0.0f), not_finite = set1(0.0f);
  const auto add = [&](VecF v) {
    high = max(high, v);
    minus_low = max(minus_low, set1(0.0f) - v);
    not_finite = fma(v, set1(0.0f), not_finite);
  };
  for_lanes(
      a.in_features, [&](int64_t i) { add(load(x + i)); },
      [&](int64_t i, int rest) { add(load_n(x + i, rest)); });
  const float top = reduce_max(high), bottom = reduce_max(minus_low), poison = reduce_add(not_finite);
  if (a.kind == TokenScale::kSymmetric) {
    *scale = (top > bottom ? top : bottom) / 127.0f + poison;
    return;
  }
  *scale = (top + bottom) / 255.0f + poison;
  if (*scale > 0.0f) *offset = static_cast<int32_t>(__builtin_rintf(-128.0f + bottom / *scale));
}

template <class T>
void quantize_row(const QuantizeTokensArgs& a, int64_t t) {
  const T* x = static_cast<const T*>(a.x) + t * a.x_stride;
  int8_t* q = a.q + t * a.in_features;
  choose_scale(a, x, a.scales + t, a.offsets + t);
  if (!(a.scales[t] > 0.0f)) {
    __builtin_memset(q, 0, a.in_features);
    return;
  }
  const VecF scale = set1(a.scales[t]), offset = set1(static_cast<float>(a.offsets[t]));
  const auto rounded = [&](VecF v) {
    const VecF limited = max(min(v / scale, set1(1e6f)), set1(-1e6f));
    return max(min(round_nearest(limited) + offset, set1(127.0f)), set1(-128.0f));
  };
  for_lanes(
      a.in_features, [&](int64_t i) { store_int8(q + i, rounded(load(x + i))); },
      [&](int64_t i, int rest) {
        int8_t buffer[kLanes];
        store_int8(buffer, rounded(load_n(x + i, rest)));
        __builtin_memcpy(q + i, buffer, rest);
      });
}

}  // namespace

}  // namespace ascend_vllm

#endif
