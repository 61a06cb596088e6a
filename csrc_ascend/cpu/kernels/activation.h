// Gated activations: f(first half of the row) times the second half.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

enum class Gate : int32_t { kSilu, kGelu, kGeluTanh };

struct GateArgs {
  DType dtype;
  Gate gate;
  const void* x;  // row t starts at t * stride elements and has 2 * width of them
  void* out;      // [rows, width], contiguous
  int64_t rows, stride, width;
};

ASCEND_VLLM_KERNEL(gate_and_mul, GateArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

inline VecF silu(VecF x) { return x / (set1(1.0f) + exp(set1(0.0f) - x)); }

inline VecF gelu(VecF x) {
  const VecF half_tail = set1(0.5f) * erfc_positive(abs(x) * set1(0.70710678118654752f));
  return x * select(gt(x, set1(0.0f)), set1(1.0f) - half_tail, half_tail);
}

// 1 + tanh(u) = 2 / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline VecF gelu_tanh(VecF x) {
  const VecF minus_2u =
      x * fma(x * x, set1(-2.0f * 0.79788456080286536f * 0.044715f), set1(-2.0f * 0.79788456080286536f));
  return x / (set1(1.0f) + exp(minus_2u));
}

template <class T, class Activation>
inline void gate_rows(const GateArgs& a, const Activation& activation) {
  constexpr int64_t kPart = 1024;  // splits wide rows, so that a single one can use every thread
  const int64_t parts = (a.width + kPart - 1) / kPart;
  parallel_for(a.rows * parts, 12 * (a.width < kPart ? a.width : kPart), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / parts, start = item % parts * kPart;
      const int64_t size = a.width - start < kPart ? a.width - start : kPart;
      const T* gate = static_cast<const T*>(a.x) + row * a.stride + start;
      const T* up = gate + a.width;
      T* out = static_cast<T*>(a.out) + row * a.width + start;
      for_lanes(
          size, [&](int64_t i) { store(out + i, activation(load(gate + i)) * load(up + i)); },
          [&](int64_t i, int rest) {
            store_n(out + i, activation(load_n(gate + i, rest)) * load_n(up + i, rest), rest);
          });
    }
  });
}

template <class T>
void gate_and_mul(const GateArgs& a) {
  switch (a.gate) {
    case Gate::kSilu:
      return gate_rows<T>(a, [](VecF x) { return silu(x); });
    case Gate::kGelu:
      return gate_rows<T>(a, [](VecF x) { return gelu(x); });
    case Gate::kGeluTanh:
      return gate_rows<T>(a, [](VecF x) { return gelu_tanh(x); });
  }
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(gate_and_mul, GateArgs) {
  with_dtype(args.dtype, [&](auto tag) { gate_and_mul<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
