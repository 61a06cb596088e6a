#include "cpu/kernels/quant_experts.h"

#include "cpu/bind/code.h"
#include "cpu/bind/expert_choices.h"
#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"

namespace ascend_vllm {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// [experts, panels, units, 16], contiguous.
void check_stack(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t experts,
                 int64_t panels, int64_t units) {
  const int64_t sizes[] = {experts, panels, units, 16};
  TORCH_CHECK(
      tensor.scalar_type() == type && tensor.sizes() == at::IntArrayRef(sizes) && tensor.is_contiguous(), name,
      " must be a contiguous ", type, " tensor of shape ", at::IntArrayRef(sizes), ", got ",
      tensor.scalar_type(), " of shape ", tensor.sizes());
}

QuantizedStack stack_of(const at::Tensor& x, int64_t experts, const at::Tensor& codes, const at::Tensor& scales,
                        const OptionalTensor& zeros, const OptionalTensor& order, int64_t inputs,
                        int64_t outputs, int64_t group_size, c10::string_view code) {
  QuantizedStack stack{};
  QuantizedLinearArgs& linear = stack.linear;
  linear.dtype = dtype_of(x, "x");
  linear.code = code_of(code);
  if (order.has_value()) {
    inputs = order->size(-1);
    TORCH_CHECK(order->scalar_type() == at::kInt && order->dim() == 2 && order->size(0) == experts &&
                    order->is_contiguous(),
                "order must be a contiguous int32 matrix of ", experts, " rows, got ", order->scalar_type(),
                " of shape ", order->sizes());
    linear.order = order->const_data_ptr<int32_t>();
  }
  TORCH_CHECK(inputs > 0 && group_size > 0 && (group_size >= inputs || group_size % 16 == 0),
              "groups must have a multiple of 16 inputs or all of them, got ", group_size, " of ", inputs);
  const int64_t panels = (outputs + 15) / 16, groups = (inputs + group_size - 1) / group_size;
  check_stack(codes, "codes", at::kInt, experts, panels, (inputs * bits_of(linear.code) + 31) / 32);
  linear.scale_dtype = dtype_of(scales, "scales");
  check_stack(scales, "scales", scales.scalar_type(), experts, panels, groups);
  if (zeros.has_value()) {
    TORCH_CHECK(linear.code != Code::kFloat8E4m3, "float8_e4m3 has no zeros");
    check_stack(*zeros, "zeros", at::kByte, experts, panels, groups);
    linear.zeros = zeros->const_data_ptr<uint8_t>();
    stack.zeros = zeros->stride(0);
  }
  linear.codes = static_cast<const uint32_t*>(codes.const_data_ptr());
  linear.scales = scales.const_data_ptr();
  linear.in_features = inputs;
  linear.out_features = outputs;
  linear.group_size = group_size;
  stack.codes = codes.stride(0);
  stack.scales = scales.stride(0) * scales.element_size();
  return stack;
}

Int8Stack stack_of(const at::Tensor& x, int64_t experts, const at::Tensor& codes, const at::Tensor& scales,
                   const OptionalTensor& sums, const OptionalTensor& static_inputs, int64_t inputs,
                   int64_t outputs) {
  TORCH_CHECK(inputs > 0 && inputs <= 65536, "there must be 1 to 65536 inputs, got ", inputs);
  Int8Stack stack{};
  Int8LinearArgs& linear = stack.linear;
  const int64_t panels = (outputs + 15) / 16;
  check_stack(codes, "codes", at::kInt, experts, panels, (inputs + 3) / 4);
  check_stack(scales, "scales", at::kFloat, experts, panels, 1);
  const auto check_numbers = [&](const at::Tensor& tensor, const char* name, at::ScalarType type,
                                 int64_t columns) {
    const int64_t sizes[] = {experts, columns};
    TORCH_CHECK(
        tensor.scalar_type() == type && tensor.sizes() == at::IntArrayRef(sizes) && tensor.is_contiguous(),
        name, " must be a contiguous ", type, " matrix of shape ", at::IntArrayRef(sizes), ", got ",
        tensor.scalar_type(), " of shape ", tensor.sizes());
  };
  if (sums.has_value()) {
    check_numbers(*sums, "sums", at::kInt, 16 * panels);
    linear.sums = sums->const_data_ptr<int32_t>();
    stack.has_offsets = true;
  }
  if (static_inputs.has_value()) {
    check_numbers(*static_inputs, "static_inputs", at::kFloat, 2);
    stack.static_inputs = static_inputs->const_data_ptr<float>();
  }
  linear.dtype = dtype_of(x, "x");
  linear.codes = static_cast<const uint32_t*>(codes.const_data_ptr());
  linear.scales = scales.const_data_ptr<float>();
  linear.in_features = inputs;
  linear.out_features = outputs;
  stack.codes = codes.stride(0);
  stack.scales = scales.stride(0);
  stack.sums = 16 * panels;
  return stack;
}

// The shape of a stack of gates and ups, and of the experts' insides.
void set_sizes(ExpertChoices& args, int64_t& width, const at::Tensor& gate_up, int64_t inner,
               int64_t first_expert) {
  TORCH_CHECK(gate_up.dim() == 4 && gate_up.size(1) % 2 == 0, "gate_up must be a stack of packed weights, got ",
              gate_up.sizes());
  width = gate_up.size(1) / 2 * 16;
  TORCH_CHECK(inner > 0 && inner <= width, "inner must be 1 to ", width, ", got ", inner);
  args.first_expert = first_expert;
  args.num_experts = gate_up.size(0);
}

// Allocates the result and runs the kernel.
template <class Args>
at::Tensor run(Args& args, const at::Tensor& x, c10::string_view activation, void (*kernel)(const Args&)) {
  args.gate_up.linear.is_gated = true;
  args.gate_up.linear.gate = gate_of(activation);
  at::Tensor out = new_tensor(x.sizes(), x.options());
  args.out = out.mutable_data_ptr();
  at::Tensor workspace = new_tensor({StackedExpertsMemory(args).bytes}, x.options().dtype(at::kByte));
  args.workspace = static_cast<char*>(workspace.mutable_data_ptr());
  launch([args, kernel] { kernel(args); });
  return out;
}

at::Tensor quantized_experts_mlp(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                                 const at::Tensor& gate_up, const at::Tensor& gate_up_scales,
                                 const OptionalTensor& gate_up_zeros, const OptionalTensor& gate_up_order,
                                 int64_t gate_up_group, c10::string_view gate_up_code, const at::Tensor& down,
                                 const at::Tensor& down_scales, const OptionalTensor& down_zeros,
                                 const OptionalTensor& down_order, int64_t down_group,
                                 c10::string_view down_code, int64_t inner, c10::string_view activation,
                                 int64_t first_expert, const OptionalTensor& shared,
                                 const OptionalTensor& shared_gate) {
  QuantizedExpertsArgs args{};
  set_choices(args, x, ids, weights, shared, shared_gate);
  set_sizes(args, args.inner, gate_up, inner, first_expert);
  args.gate_up = stack_of(x, args.num_experts, gate_up, gate_up_scales, gate_up_zeros, gate_up_order,
                          args.hidden, 2 * args.inner, gate_up_group, gate_up_code);
  args.down = stack_of(x, args.num_experts, down, down_scales, down_zeros, down_order, inner, args.hidden,
                       down_group, down_code);
  return run(args, x, activation, quantized_experts_kernel);
}

at::Tensor int8_experts_mlp(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                            const at::Tensor& gate_up, const at::Tensor& gate_up_scales,
                            const OptionalTensor& gate_up_sums, const OptionalTensor& gate_up_inputs,
                            const at::Tensor& down, const at::Tensor& down_scales,
                            const OptionalTensor& down_sums, const OptionalTensor& down_inputs, int64_t inner,
                            c10::string_view activation, int64_t first_expert, const OptionalTensor& shared,
                            const OptionalTensor& shared_gate) {
  Int8ExpertsArgs args{};
  set_choices(args, x, ids, weights, shared, shared_gate);
  set_sizes(args, args.inner, gate_up, inner, first_expert);
  args.gate_up = stack_of(x, args.num_experts, gate_up, gate_up_scales, gate_up_sums, gate_up_inputs,
                          args.hidden, 2 * args.inner);
  args.down = stack_of(x, args.num_experts, down, down_scales, down_sums, down_inputs, inner, args.hidden);
  return run(args, x, activation, int8_experts_kernel);
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("quantized_experts_mlp", &ascend_vllm::quantized_experts_mlp);
  m.impl("int8_experts_mlp", &ascend_vllm::int8_experts_mlp);
}
