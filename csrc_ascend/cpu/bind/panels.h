// Checks of weights in panels of 16 outputs, see ops/gemm.py.
#pragma once

#include <ATen/core/Tensor.h>

namespace ascend_vllm {

// Whether a tensor has the shape of a packed weight with `in_features` inputs and `panels` panels.
inline bool holds_panels(const at::Tensor& packed, int64_t in_features, int64_t panels) {
  const bool pairs = packed.scalar_type() == at::kBFloat16;
  const bool fits = pairs ? packed.dim() == 4 && packed.size(1) == (in_features + 1) / 2 && packed.size(3) == 2
                          : packed.dim() == 3 && packed.size(1) == in_features;
  return fits && packed.size(0) == panels && packed.size(2) == 16 && packed.is_contiguous();
}

// Whether a tensor has the shape of a stack of packed weights, see holds_panels.
inline bool holds_stack(const at::Tensor& stack, int64_t in_features, int64_t panels) {
  const bool pairs = stack.scalar_type() == at::kBFloat16;
  const bool fits = pairs ? stack.dim() == 5 && stack.size(2) == (in_features + 1) / 2 && stack.size(4) == 2
                          : stack.dim() == 4 && stack.size(2) == in_features;
  return fits && stack.size(1) == panels && stack.size(3) == 16 && stack.is_contiguous();
}

// Bytes of a unit: an element, or a pair of bfloat16 elements.
inline int64_t unit_bytes(const at::Tensor& packed) {
  return packed.dim() == 4 ? 2 * packed.element_size() : packed.element_size();
}

}  // namespace ascend_vllm
