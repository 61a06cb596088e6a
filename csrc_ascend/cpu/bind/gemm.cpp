#include "cpu/kernels/gemm.h"

#include <ATen/ops/empty.h>

#include "cpu/bind/tensor.h"

namespace ascend_vllm {
namespace {

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         int64_t out_features) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got ", x.sizes());
  check_rows(x, "x");
  check_same_dtype(packed, "packed", x);
  const bool pairs = x.scalar_type() == at::kBFloat16;
  const int64_t in_features = x.size(1);
  const int64_t panels = (out_features + 15) / 16;
  const bool fits = pairs ? packed.dim() == 4 && packed.size(1) == (in_features + 1) / 2 && packed.size(3) == 2
                          : packed.dim() == 3 && packed.size(1) == in_features;
  TORCH_CHECK(fits && packed.size(0) == panels && packed.size(2) == 16 && packed.is_contiguous(),
              "packed has shape ", packed.sizes(), ", which is no ", x.scalar_type(), " weight of ",
              in_features, " inputs and ", out_features, " outputs");
  LinearArgs args{};
  if (bias.has_value()) {
    check_vector(*bias, "bias", x.scalar_type(), out_features);
    args.bias = bias->const_data_ptr();
  }
  at::Tensor out = at::empty({x.size(0), out_features}, x.options());
  at::Tensor workspace;
  if (x.scalar_type() != at::kFloat) {
    workspace = at::empty({linear_workspace(x.size(0), in_features)}, x.options().dtype(at::kFloat));
    args.workspace = workspace.mutable_data_ptr();
  }
  args.dtype = dtype_of(x, "x");
  args.x = x.const_data_ptr();
  args.packed = packed.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.rows = x.size(0);
  args.x_stride = x.stride(0);
  args.in_features = in_features;
  args.out_features = out_features;
  packed_linear_kernel(args);
  return out;
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) { m.impl("packed_linear", &ascend_vllm::packed_linear); }
