#include "cpu/kernels/columns.h"

#include <ATen/core/List.h>

#include <vector>

#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"

namespace ascend_vllm {
namespace {

at::Tensor add_rows(const at::Tensor& x, const at::Tensor& y) {
  TORCH_CHECK(x.dim() == 2 && y.sizes() == x.sizes(), "x and y must be two matrices of one shape");
  check_rows(x, "x");
  check_rows(y, "y");
  check_same_dtype(y, "y", x);
  at::Tensor out = new_tensor(x.sizes(), x.options());
  const AddRowsArgs args{
      .dtype = dtype_of(x, "x"),
      .x = x.const_data_ptr(),
      .y = y.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .rows = x.size(0),
      .x_stride = x.stride(0),
      .y_stride = y.stride(0),
      .width = x.size(1),
  };
  launch([args] { add_rows_kernel(args); });
  return out;
}

at::Tensor concat_columns(at::TensorList parts) {
  TORCH_CHECK(!parts.empty(), "there must be a matrix at least");
  const at::Tensor& first = parts[0];
  int64_t width = 0;
  for (const at::Tensor& part : parts) {
    TORCH_CHECK(part.dim() == 2 && part.size(0) == first.size(0), "all parts must be matrices of as many rows");
    check_rows(part, "a part");
    check_same_dtype(part, "a part", first);
    width += part.size(1);
  }
  at::Tensor out = new_tensor({first.size(0), width}, first.options());
  const auto size = static_cast<int64_t>(first.element_size());
  std::vector<CopyRowsArgs> copies;
  int64_t column = 0;
  for (const at::Tensor& part : parts) {
    copies.push_back({
        .x = static_cast<const char*>(part.const_data_ptr()),
        .out = static_cast<char*>(out.mutable_data_ptr()) + column * size,
        .rows = part.size(0),
        .stride = part.stride(0) * size,
        .out_stride = width * size,
        .size = part.size(1) * size,
    });
    column += part.size(1);
  }
  launch([copies] {
    for (const CopyRowsArgs& args : copies) copy_rows_kernel(args);
  });
  return out;
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("add_rows", &ascend_vllm::add_rows);
  m.impl("concat_columns", &ascend_vllm::concat_columns);
}
