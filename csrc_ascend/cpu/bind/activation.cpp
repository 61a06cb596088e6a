#include "cpu/kernels/activation.h"

#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"
#include "cpu/kernels/widen.h"

namespace ascend_vllm {
namespace {

at::Tensor gate_and_mul(const at::Tensor& x, Gate gate) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x must be a matrix with an even number of columns, got ",
              x.sizes());
  check_rows(x, "x");
  at::Tensor out = new_tensor({x.size(0), x.size(1) / 2}, x.options());
  const GateArgs args{
      .dtype = dtype_of(x, "x"),
      .gate = gate,
      .x = x.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .rows = x.size(0),
      .stride = x.stride(0),
      .width = x.size(1) / 2,
  };
  launch([args] { gate_and_mul_kernel(args); });
  return out;
}

at::Tensor silu_and_mul(const at::Tensor& x) { return gate_and_mul(x, Gate::kSilu); }

at::Tensor gelu_and_mul(const at::Tensor& x, c10::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "approximate must be 'none' or 'tanh', got '", approximate, "'");
  return gate_and_mul(x, approximate == "none" ? Gate::kGelu : Gate::kGeluTanh);
}

at::Tensor to_float32(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got ", x.sizes());
  check_rows(x, "x");
  at::Tensor out = new_tensor(x.sizes(), x.options().dtype(at::kFloat));
  const WidenArgs args{
      .dtype = dtype_of(x, "x"),
      .x = x.const_data_ptr(),
      .out = out.mutable_data_ptr<float>(),
      .rows = x.size(0),
      .stride = x.stride(0),
      .width = x.size(1),
  };
  launch([args] { widen_kernel(args); });
  return out;
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("silu_and_mul", &ascend_vllm::silu_and_mul);
  m.impl("gelu_and_mul", &ascend_vllm::gelu_and_mul);
  m.impl("to_float32", &ascend_vllm::to_float32);
}
