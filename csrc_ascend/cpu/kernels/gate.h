// The activations of gated MLPs.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ascend_vllm {

enum class Gate : int32_t { kSilu, kGelu, kGeluTanh };

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

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

#ifdef __AVX512BF16__
// SiLU with a relative error below 2e-4, a tenth of what rounding to bfloat16 does. Sets whose choice may
// differ must round alike (FAMILIES in ops/kernel_choice.py): those that have this are on their own.
inline VecF silu_coarse(VecF x) {
  return x * _mm512_rcp14_ps(set1(1.0f) + exp2_coarse(x * set1(-1.44269504088896341f)));
}
#endif

// Calls body(activation), a function of VecF, for results of type T.
template <class T, class Body>
inline void with_gate(Gate gate, const Body& body) {
  switch (gate) {
    case Gate::kSilu:
#ifdef __AVX512BF16__
      if constexpr (std::is_same_v<T, bfloat16>) return body([](VecF x) { return silu_coarse(x); });
#endif
      return body([](VecF x) { return silu(x); });
    case Gate::kGelu:
      return body([](VecF x) { return gelu(x); });
    case Gate::kGeluTanh:
      return body([](VecF x) { return gelu_tanh(x); });
  }
}

}  // namespace
}  // namespace ascend_vllm

#endif
