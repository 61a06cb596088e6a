#include "cpu/kernels/quant_gemm.h"

#include <tuple>

#include "cpu/bind/code.h"
#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"
#include "cpu/kernels/quant_pack.h"
#include "cpu/kernels/quant_tokens.h"

namespace ascend_vllm {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

Gate gate_of(c10::string_view activation, int64_t out_features) {
  TORCH_CHECK_VALUE(activation == "silu" || activation == "gelu" || activation == "gelu_tanh",
                    "activation must be 'silu', 'gelu' or 'gelu_tanh', got '", activation, "'");
  TORCH_CHECK(out_features % 32 == 0, "out_features must be a multiple of 32, got ", out_features);
  return activation == "silu" ? Gate::kSilu : activation == "gelu" ? Gate::kGelu : Gate::kGeluTanh;
}

void check_panels(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t panels,
                  int64_t units) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.dim() == 3 && tensor.size(0) == panels &&
                  tensor.size(1) == units && tensor.size(2) == 16 && tensor.is_contiguous(),
              name, " must be a contiguous ", type, " tensor of shape [", panels, ", ", units, ", 16], got ",
              tensor.scalar_type(), " of shape ", tensor.sizes());
}

const float* bias_of(const OptionalTensor& bias, int64_t out_features) {
  if (!bias.has_value()) return nullptr;
  check_vector(*bias, "bias", at::kFloat, out_features);
  return bias->const_data_ptr<float>();
}

at::Tensor multiply(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                    const OptionalTensor& zeros, const OptionalTensor& bias, const OptionalTensor& order,
                    int64_t out_features, int64_t group_size, c10::string_view code, std::optional<Gate> gate,
                    bool rounds_inputs) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got ", x.sizes());
  check_rows(x, "x");
  QuantizedLinearArgs args{};
  args.dtype = dtype_of(x, "x");
  args.code = code_of(code);
  TORCH_CHECK(!rounds_inputs || args.code != Code::kFloat8E4m3, "inputs of float8_e4m3 are not rounded");
  args.rounds_inputs = rounds_inputs;
  const int64_t inputs = order.has_value() ? order->numel() : x.size(1), panels = (out_features + 15) / 16;
  TORCH_CHECK(inputs > 0 && group_size > 0 && (group_size >= inputs || group_size % 16 == 0),
              "groups must have a multiple of 16 inputs or all of them, got ", group_size, " of ", inputs);
  const int64_t groups = (inputs + group_size - 1) / group_size;
  check_panels(codes, "codes", at::kInt, panels, (inputs * bits_of(args.code) + 31) / 32);
  args.scale_dtype = dtype_of(scales, "scales");
  check_panels(scales, "scales", scales.scalar_type(), panels, groups);
  if (zeros.has_value()) {
    TORCH_CHECK(args.code != Code::kFloat8E4m3, "float8_e4m3 has no zeros");
    check_panels(*zeros, "zeros", at::kByte, panels, groups);
    args.zeros = zeros->const_data_ptr<uint8_t>();
  }
  if (order.has_value()) {
    check_vector(*order, "order", at::kInt, inputs);
    args.order = order->const_data_ptr<int32_t>();
  }
  args.bias = bias_of(bias, out_features);
  at::Tensor out = new_tensor({x.size(0), gate.has_value() ? out_features / 2 : out_features}, x.options());
  args.x = x.const_data_ptr();
  args.codes = static_cast<const uint32_t*>(codes.const_data_ptr());
  args.scales = scales.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.rows = x.size(0);
  args.x_stride = x.stride(0);
  args.in_features = inputs;
  args.out_features = out_features;
  args.group_size = group_size;
  args.is_gated = gate.has_value();
  args.gate = gate.value_or(Gate::kSilu);
  at::Tensor workspace = new_tensor({QuantizedInputs(args).bytes}, x.options().dtype(at::kByte));
  args.workspace = static_cast<char*>(workspace.mutable_data_ptr());
  launch([args] { quantized_linear_kernel(args); });
  return out;
}

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                            const OptionalTensor& zeros, const OptionalTensor& bias,
                            const OptionalTensor& order, int64_t out_features, int64_t group_size,
                            c10::string_view code, bool rounds_inputs) {
  return multiply(x, codes, scales, zeros, bias, order, out_features, group_size, code, std::nullopt,
                  rounds_inputs);
}

at::Tensor quantized_gated_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                                  const OptionalTensor& zeros, const OptionalTensor& bias,
                                  const OptionalTensor& order, int64_t out_features, int64_t group_size,
                                  c10::string_view code, c10::string_view activation, bool rounds_inputs) {
  const Gate gate = gate_of(activation, out_features);
  return multiply(x, codes, scales, zeros, bias, order, out_features, group_size, code, gate, rounds_inputs);
}

at::Tensor multiply_int8(const at::Tensor& q, const at::Tensor& q_scales, const OptionalTensor& q_offsets,
                         const at::Tensor& codes, const at::Tensor& scales, const OptionalTensor& sums,
                         const OptionalTensor& bias, int64_t out_features, at::ScalarType dtype,
                         std::optional<Gate> gate) {
  TORCH_CHECK(q.dim() == 2 && q.scalar_type() == at::kChar && q.is_contiguous(),
              "q must be a contiguous int8 matrix, got ", q.scalar_type(), " of shape ", q.sizes());
  const int64_t rows = q.size(0), inputs = q.size(1), panels = (out_features + 15) / 16;
  TORCH_CHECK(inputs > 0 && inputs <= 65536, "there must be 1 to 65536 inputs, got ", inputs);
  check_vector(q_scales, "q_scales", at::kFloat, rows);
  check_panels(codes, "codes", at::kInt, panels, (inputs + 3) / 4);
  check_panels(scales, "scales", at::kFloat, panels, 1);
  Int8LinearArgs args{};
  if (q_offsets.has_value()) {
    check_vector(*q_offsets, "q_offsets", at::kInt, rows);
    TORCH_CHECK(sums.has_value(), "q_offsets need the sums of the weight");
    check_vector(*sums, "sums", at::kInt, out_features);
    args.q_offsets = q_offsets->const_data_ptr<int32_t>();
    args.sums = sums->const_data_ptr<int32_t>();
  }
  args.bias = bias_of(bias, out_features);
  const at::TensorOptions options = q.options().dtype(dtype);
  at::Tensor out = new_tensor({rows, gate.has_value() ? out_features / 2 : out_features}, options);
  args.dtype = dtype_of(out, "the result");
  args.q = q.const_data_ptr<int8_t>();
  args.q_scales = q_scales.const_data_ptr<float>();
  args.codes = static_cast<const uint32_t*>(codes.const_data_ptr());
  args.scales = scales.const_data_ptr<float>();
  args.out = out.mutable_data_ptr();
  args.rows = rows;
  args.in_features = inputs;
  args.out_features = out_features;
  args.is_gated = gate.has_value();
  args.gate = gate.value_or(Gate::kSilu);
  at::Tensor workspace = new_tensor({int8_workspace(rows, inputs)}, q.options().dtype(at::kByte));
  args.workspace = static_cast<char*>(workspace.mutable_data_ptr());
  launch([args] { int8_linear_kernel(args); });
  return out;
}

at::Tensor int8_linear(const at::Tensor& q, const at::Tensor& q_scales, const OptionalTensor& q_offsets,
                       const at::Tensor& codes, const at::Tensor& scales, const OptionalTensor& sums,
                       const OptionalTensor& bias, int64_t out_features, at::ScalarType dtype) {
  return multiply_int8(q, q_scales, q_offsets, codes, scales, sums, bias, out_features, dtype, std::nullopt);
}

at::Tensor int8_gated_linear(const at::Tensor& q, const at::Tensor& q_scales, const OptionalTensor& q_offsets,
                             const at::Tensor& codes, const at::Tensor& scales, const OptionalTensor& sums,
                             const OptionalTensor& bias, int64_t out_features, at::ScalarType dtype,
                             c10::string_view activation) {
  const Gate gate = gate_of(activation, out_features);
  return multiply_int8(q, q_scales, q_offsets, codes, scales, sums, bias, out_features, dtype, gate);
}

void pack_codes(const at::Tensor& values, const at::Tensor& codes, int64_t first_row, int64_t bits) {
  TORCH_CHECK(values.dim() == 2 && values.scalar_type() == at::kByte, "values must be a uint8 matrix, got ",
              values.scalar_type(), " of shape ", values.sizes());
  check_rows(values, "values");
  TORCH_CHECK(bits == 4 || bits == 8, "codes have 4 or 8 bits, got ", bits);
  TORCH_CHECK(codes.dim() == 3, "codes must be packed, got shape ", codes.sizes());
  const int64_t words = (values.size(1) * bits + 31) / 32;
  check_panels(codes, "codes", at::kInt, codes.size(0), words);
  TORCH_CHECK(first_row >= 0 && first_row + values.size(0) <= 16 * codes.size(0), "codes of shape ",
              codes.sizes(), " have no room for ", values.size(0), " rows from row ", first_row, " on");
  pack_codes_kernel({
      .values = values.const_data_ptr<uint8_t>(),
      .codes = static_cast<uint32_t*>(codes.mutable_data_ptr()),
      .first_row = first_row,
      .rows = values.size(0),
      .in_features = values.size(1),
      .row_stride = values.stride(0),
      .words = words,
      .bits = static_cast<int>(bits),
  });
}

using QuantizedTokens = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

QuantizedTokens quantize(const at::Tensor& x, TokenScale kind, float scale, int32_t offset) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got ", x.sizes());
  check_rows(x, "x");
  at::Tensor q = new_tensor(x.sizes(), x.options().dtype(at::kChar));
  at::Tensor scales = new_tensor({x.size(0)}, x.options().dtype(at::kFloat));
  at::Tensor offsets = new_tensor({x.size(0)}, x.options().dtype(at::kInt));
  const QuantizeTokensArgs args{
      .dtype = dtype_of(x, "x"),
      .x = x.const_data_ptr(),
      .q = q.mutable_data_ptr<int8_t>(),
      .scales = scales.mutable_data_ptr<float>(),
      .offsets = offsets.mutable_data_ptr<int32_t>(),
      .rows = x.size(0),
      .x_stride = x.stride(0),
      .in_features = x.size(1),
      .kind = kind,
      .static_scale = scale,
      .static_offset = offset,
  };
  launch([args] { quantize_tokens_kernel(args); });
  return {q, scales, offsets};
}

QuantizedTokens quantize_tokens(const at::Tensor& x, bool has_offset) {
  return quantize(x, has_offset ? TokenScale::kOffset : TokenScale::kSymmetric, 0.0f, 0);
}

QuantizedTokens quantize_static(const at::Tensor& x, double scale, int64_t offset) {
  TORCH_CHECK(scale > 0, "scale must be above 0, got ", scale);
  return quantize(x, TokenScale::kStatic, static_cast<float>(scale), static_cast<int32_t>(offset));
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("quantized_linear", &ascend_vllm::quantized_linear);
  m.impl("quantized_gated_linear", &ascend_vllm::quantized_gated_linear);
  m.impl("int8_linear", &ascend_vllm::int8_linear);
  m.impl("int8_gated_linear", &ascend_vllm::int8_gated_linear);
  m.impl("pack_codes", &ascend_vllm::pack_codes);
  m.impl("quantize_tokens", &ascend_vllm::quantize_tokens);
  m.impl("quantize_static", &ascend_vllm::quantize_static);
}
