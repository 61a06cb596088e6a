#include "cpu/kernels/experts.h"

#include <tuple>

#include "cpu/bind/kept_memory.h"
#include "cpu/bind/panels.h"
#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"
#include "cpu/kernels/route.h"

namespace ascend_vllm {
namespace {

at::Tensor experts_mlp(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                       const at::Tensor& gate_up, const at::Tensor& down, c10::string_view activation,
                       int64_t first_expert, const std::optional<at::Tensor>& shared,
                       const std::optional<at::Tensor>& shared_gate) {
  TORCH_CHECK_VALUE(activation == "silu" || activation == "gelu" || activation == "gelu_tanh",
                    "activation must be 'silu', 'gelu' or 'gelu_tanh', got '", activation, "'");
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got ", x.sizes());
  check_rows(x, "x");
  check_same_dtype(gate_up, "gate_up", x);
  check_same_dtype(down, "down", x);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  TORCH_CHECK(ids.dim() == 2 && ids.size(0) == tokens && ids.scalar_type() == at::kInt && ids.is_contiguous(),
              "ids must be a contiguous int32 matrix of ", tokens, " rows, got ", ids.scalar_type(),
              " of shape ", ids.sizes());
  TORCH_CHECK(weights.sizes() == ids.sizes() && weights.scalar_type() == at::kFloat && weights.is_contiguous(),
              "weights must be a contiguous float tensor of shape ", ids.sizes(), ", got ",
              weights.scalar_type(), " of shape ", weights.sizes());
  TORCH_CHECK(gate_up.dim() > 3 && down.dim() > 3, "gate_up and down must be stacks of packed weights, got ",
              gate_up.sizes(), " and ", down.sizes());
  const int64_t inner = gate_up.size(1) / 2 * 16;
  const int64_t down_inputs = down.size(2) * (x.scalar_type() == at::kBFloat16 ? 2 : 1);
  TORCH_CHECK(gate_up.size(1) % 2 == 0 && holds_stack(gate_up, hidden, gate_up.size(1)) &&
                  holds_stack(down, down_inputs, (hidden + 15) / 16) && gate_up.size(0) == down.size(0) &&
                  down_inputs <= inner,
              "gate_up and down have shapes ", gate_up.sizes(), " and ", down.sizes(), ", not those of ",
              x.scalar_type(), " experts of ", hidden, " inputs");
  const auto check_like_x = [&](const at::Tensor& tensor, const char* name, int64_t width) {
    check_same_dtype(tensor, name, x);
    TORCH_CHECK(
        tensor.dim() == 2 && tensor.size(0) == tokens && tensor.size(1) == width && tensor.is_contiguous(),
        name, " must be contiguous, of shape [", tokens, ", ", width, "], got ", tensor.sizes());
    return tensor.const_data_ptr();
  };
  ExpertsArgs args{};
  if (shared.has_value()) args.shared = check_like_x(*shared, "shared", hidden);
  if (shared_gate.has_value()) args.shared_gate = check_like_x(*shared_gate, "shared_gate", 1);
  args.dtype = dtype_of(x, "x");
  args.x = x.const_data_ptr();
  args.ids = ids.const_data_ptr<int32_t>();
  args.weights = weights.const_data_ptr<float>();
  args.gate_up = gate_up.const_data_ptr();
  args.down = down.const_data_ptr();
  args.tokens = tokens;
  args.hidden = hidden;
  args.x_stride = x.stride(0);
  args.choices = ids.size(1);
  args.first_expert = first_expert;
  args.num_experts = gate_up.size(0);
  args.inner = inner;
  args.down_inputs = down_inputs;
  args.gate = activation == "silu" ? Gate::kSilu : activation == "gelu" ? Gate::kGelu : Gate::kGeluTanh;
  at::Tensor out = new_tensor({tokens, hidden}, x.options());
  args.out = out.mutable_data_ptr();
  const int64_t bytes = ExpertsMemory(args).bytes;
  const at::TensorOptions options = x.options().dtype(at::kByte);
  // recorded calls use the tape's memory
  at::Tensor workspace =
      recording().tape == nullptr ? large_result({bytes}, options) : new_tensor({bytes}, options);
  args.workspace = static_cast<char*>(workspace.mutable_data_ptr());
  launch([args] { experts_mlp_kernel(args); });
  return out;
}

std::tuple<at::Tensor, at::Tensor> route_tokens(const at::Tensor& logits, const std::optional<at::Tensor>& bias,
                                                int64_t choices, c10::string_view scoring, bool renormalize,
                                                int64_t groups, int64_t chosen_groups, double scale) {
  TORCH_CHECK_VALUE(scoring == "softmax" || scoring == "sigmoid",
                    "scoring must be 'softmax' or 'sigmoid', got '", scoring, "'");
  TORCH_CHECK(logits.dim() == 2, "logits must be a matrix, got ", logits.sizes());
  check_rows(logits, "logits");
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  TORCH_CHECK(groups > 0 && experts % groups == 0 && chosen_groups > 0 && chosen_groups <= groups &&
                  choices > 0 && choices <= experts / groups * chosen_groups,
              choices, " of ", experts, " experts cannot be chosen from ", chosen_groups, " of ", groups,
              " groups");
  if (bias.has_value()) check_vector(*bias, "bias", at::kFloat, experts);
  RouteArgs args{};
  args.dtype = dtype_of(logits, "logits");
  args.logits = logits.const_data_ptr();
  args.bias = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  args.tokens = tokens;
  args.stride = logits.stride(0);
  args.experts = experts;
  args.choices = choices;
  args.groups = groups;
  args.chosen_groups = chosen_groups;
  args.is_sigmoid = scoring == "sigmoid";
  args.renormalize = renormalize;
  args.scale = static_cast<float>(scale);
  at::Tensor ids = new_tensor({tokens, choices}, logits.options().dtype(at::kInt));
  at::Tensor weights = new_tensor({tokens, choices}, logits.options().dtype(at::kFloat));
  at::Tensor workspace = new_tensor({tokens, 2 * experts + groups}, logits.options().dtype(at::kFloat));
  args.ids = ids.mutable_data_ptr<int32_t>();
  args.weights = weights.mutable_data_ptr<float>();
  args.workspace = workspace.mutable_data_ptr<float>();
  launch([args] { route_tokens_kernel(args); });
  return {ids, weights};
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("experts_mlp", &ascend_vllm::experts_mlp);
  m.impl("route_tokens", &ascend_vllm::route_tokens);
}
