#include "cpu/kernels/gemm.h"

#include "cpu/bind/panels.h"
#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"
#include "cpu/kernels/pack.h"

namespace ascend_vllm {
namespace {

at::Tensor multiply(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                    int64_t out_features, std::optional<Gate> gate) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got ", x.sizes());
  check_rows(x, "x");
  check_same_dtype(packed, "packed", x);
  const int64_t in_features = x.size(1);
  TORCH_CHECK(holds_panels(packed, in_features, (out_features + 15) / 16), "packed has shape ", packed.sizes(),
              ", not that of a ", x.scalar_type(), " weight of ", in_features, " inputs and ", out_features,
              " outputs");
  LinearArgs args{};
  if (bias.has_value()) {
    check_vector(*bias, "bias", x.scalar_type(), out_features);
    args.bias = bias->const_data_ptr();
  }
  const int64_t shape[] = {x.size(0), gate.has_value() ? out_features / 2 : out_features};
  at::Tensor out = new_tensor(shape, x.options());
  at::Tensor workspace;
  if (x.scalar_type() != at::kFloat) {
    workspace = new_tensor({linear_workspace(x.size(0), in_features)}, x.options().dtype(at::kFloat));
    args.workspace = workspace.mutable_data_ptr();
  }
  args.dtype = dtype_of(x, "x");
  args.x = x.const_data_ptr();
  args.packed = packed.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.rows = x.size(0);
  args.x_stride = x.stride(0);
  args.out_stride = shape[1];
  args.in_features = in_features;
  args.out_features = out_features;
  args.is_gated = gate.has_value();
  args.gate = gate.value_or(Gate::kSilu);
  launch([args] { packed_linear_kernel(args); });
  return out;
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         int64_t out_features) {
  return multiply(x, packed, bias, out_features, std::nullopt);
}

at::Tensor packed_gated_linear(const at::Tensor& x, const at::Tensor& packed,
                               const std::optional<at::Tensor>& bias, int64_t out_features,
                               c10::string_view activation) {
  TORCH_CHECK_VALUE(activation == "silu" || activation == "gelu" || activation == "gelu_tanh",
                    "activation must be 'silu', 'gelu' or 'gelu_tanh', got '", activation, "'");
  TORCH_CHECK(out_features % 32 == 0, "out_features must be a multiple of 32, got ", out_features);
  const Gate gate = activation == "silu" ? Gate::kSilu : activation == "gelu" ? Gate::kGelu : Gate::kGeluTanh;
  return multiply(x, packed, bias, out_features, gate);
}

void pack_panels(const at::Tensor& weight, const at::Tensor& packed, int64_t first_row) {
  TORCH_CHECK(weight.dim() == 2, "weight must be a matrix, got ", weight.sizes());
  check_rows(weight, "weight");
  dtype_of(weight, "weight");
  check_same_dtype(packed, "packed", weight);
  TORCH_CHECK(packed.dim() > 0 && holds_panels(packed, weight.size(1), packed.size(0)) && first_row >= 0 &&
                  first_row + weight.size(0) <= 16 * packed.size(0),
              "packed has shape ", packed.sizes(), ", which has no room for ", weight.size(0), " rows of ",
              weight.size(1), " inputs, ", weight.scalar_type(), ", from row ", first_row, " on");
  pack_panels_kernel({
      .weight = static_cast<const char*>(weight.const_data_ptr()),
      .packed = static_cast<char*>(packed.mutable_data_ptr()),
      .first_row = first_row,
      .rows = weight.size(0),
      .in_features = weight.size(1),
      .row_bytes = weight.stride(0) * weight.element_size(),
      .element_bytes = weight.element_size(),
      .unit_bytes = unit_bytes(packed),
  });
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("packed_linear", &ascend_vllm::packed_linear);
  m.impl("packed_gated_linear", &ascend_vllm::packed_gated_linear);
  m.impl("pack_panels", &ascend_vllm::pack_panels);
}
