// Helpers of bindings, with few torch headers: dtype tags and checks of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "common/dtype.h"

namespace ascend_vllm {

inline DType dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK(false, name, " must be float32, bfloat16 or float16, got ", tensor.scalar_type());
  }
}

inline void check_same_dtype(const at::Tensor& tensor, const char* name, const at::Tensor& other) {
  TORCH_CHECK(tensor.scalar_type() == other.scalar_type(), name, " must be ", other.scalar_type(), ", got ",
              tensor.scalar_type());
}

// Checks that the last dimension is contiguous (a size of one counts as such).
inline void check_rows(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.dim() > 0 && (tensor.stride(-1) == 1 || tensor.size(-1) <= 1), name,
              " must be contiguous in its last dimension, got strides ", tensor.strides());
}

inline void check_vector(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t size) {
  TORCH_CHECK(
      tensor.scalar_type() == type && tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous(),
      name, " must be a contiguous ", type, " tensor of ", size, " elements, got ", tensor.scalar_type(),
      " of shape ", tensor.sizes());
}

// The rows of x[..., H], outer * inner of them; row (o, i) starts at o * outer_stride + i * inner_stride.
struct RowView {
  const void* data;
  int64_t outer = 1, inner = 1;
  int64_t outer_stride = 0, inner_stride = 0;
};

// Describes x without a copy if its leading dimensions fold into two (any view of one or two leading dimensions
// does); otherwise copies it into `storage`.
inline RowView row_view(const at::Tensor& x, const char* name, at::Tensor& storage) {
  check_rows(x, name);
  RowView view{.data = x.const_data_ptr()};
  int64_t sizes[2] = {1, 1}, strides[2] = {0, 0};  // innermost first
  int used = 0;
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (used > 0 && x.stride(d) == sizes[used - 1] * strides[used - 1]) {
      sizes[used - 1] *= x.size(d);
    } else if (used < 2) {
      sizes[used] = x.size(d);
      strides[used++] = x.stride(d);
    } else {
      storage = x.contiguous();
      return row_view(storage, name, storage);
    }
  }
  view.inner = sizes[0];
  view.inner_stride = strides[0];
  view.outer = sizes[1];
  view.outer_stride = strides[1];
  return view;
}

}  // namespace ascend_vllm
