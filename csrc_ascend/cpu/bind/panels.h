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

// Bytes of a unit: an element, or a pair of bfloat16 elements.
inline int64_t unit_bytes(const at::Tensor& packed) {
  return packed.dim() == 4 ? 2 * packed.element_size() : packed.element_size();
}

}  // namespace ascend_vllm
