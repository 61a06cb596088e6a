#include "cpu/kernels/norm.h"

#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"

namespace ascend_vllm {
namespace {

void check_parameter(const at::Tensor& tensor, const char* name, const at::Tensor& x) {
  check_same_dtype(tensor, name, x);
  check_vector(tensor, name, x.scalar_type(), x.size(-1));
}

// `storage` keeps the rows alive if they had to be copied.
NormArgs norm_args(const at::Tensor& x, at::Tensor& storage, at::Tensor& out, double epsilon) {
  const RowView rows = row_view(x, "x", storage);
  if (storage.defined()) check_not_recording("a norm of rows that are copied");
  out = new_tensor(x.sizes(), x.options());
  NormArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = rows.data;
  args.out = out.mutable_data_ptr();
  args.outer = rows.outer;
  args.inner = rows.inner;
  args.outer_stride = rows.outer_stride;
  args.inner_stride = rows.inner_stride;
  args.hidden = x.size(-1);
  args.epsilon = static_cast<float>(epsilon);
  return args;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  at::Tensor storage, out;
  NormArgs args = norm_args(x, storage, out, epsilon);
  check_parameter(weight, "weight", x);
  args.weight = weight.const_data_ptr();
  launch([args] { rms_norm_kernel(args); });
  return out;
}

at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double epsilon) {
  at::Tensor storage, out;
  NormArgs args = norm_args(x, storage, out, epsilon);
  if (weight.has_value()) {
    check_parameter(*weight, "weight", x);
    args.weight = weight->const_data_ptr();
  }
  if (bias.has_value()) {
    check_parameter(*bias, "bias", x);
    args.bias = bias->const_data_ptr();
  }
  launch([args] { layer_norm_kernel(args); });
  return out;
}

void fused_add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                        double epsilon) {
  TORCH_CHECK(x.dim() == 2 && residual.sizes() == x.sizes(),
              "x and residual must be two matrices of one shape");
  check_rows(x, "x");
  check_rows(residual, "residual");
  check_same_dtype(residual, "residual", x);
  check_parameter(weight, "weight", x);
  const FusedAddRmsNormArgs args{
      .dtype = dtype_of(x, "x"),
      .x = x.mutable_data_ptr(),
      .residual = residual.mutable_data_ptr(),
      .weight = weight.const_data_ptr(),
      .rows = x.size(0),
      .x_stride = x.stride(0),
      .residual_stride = residual.stride(0),
      .hidden = x.size(1),
      .epsilon = static_cast<float>(epsilon),
  };
  launch([args] { fused_add_rms_norm_kernel(args); });
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("rms_norm", &ascend_vllm::rms_norm);
  m.impl("layer_norm", &ascend_vllm::layer_norm);
  m.impl("fused_add_rms_norm", &ascend_vllm::fused_add_rms_norm);
}
