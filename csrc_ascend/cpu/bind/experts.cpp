#include "cpu/kernels/experts.h"

#include <tuple>

#include "cpu/bind/expert_choices.h"
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
  ExpertsArgs args{};
  set_choices(args, x, ids, weights, shared, shared_gate);
  check_same_dtype(gate_up, "gate_up", x);
  check_same_dtype(down, "down", x);
  const int64_t hidden = x.size(1);
  TORCH_CHECK(gate_up.dim() > 3 && down.dim() > 3, "gate_up and down must be stacks of packed weights, got ",
              gate_up.sizes(), " and ", down.sizes());
  const int64_t inner = gate_up.size(1) / 2 * 16;
  const int64_t down_inputs = down.size(2) * (x.scalar_type() == at::kBFloat16 ? 2 : 1);
  TORCH_CHECK(gate_up.size(1) % 2 == 0 && holds_stack(gate_up, hidden, gate_up.size(1)) &&
                  holds_stack(down, down_inputs, (hidden + 15) / 16) && gate_up.size(0) == down.size(0) &&
                  down_inputs <= inner,
              "gate_up and down have shapes ", gate_up.sizes(), " and ", down.sizes(), ", not those of ",
              x.scalar_type(), " experts of ", hidden, " inputs");
  args.gate_up = gate_up.const_data_ptr();
  args.down = down.const_data_ptr();
  args.first_expert = first_expert;
  args.num_experts = gate_up.size(0);
  args.inner = inner;
  args.down_inputs = down_inputs;
  args.gate = gate_of(activation);
  at::Tensor out = new_tensor(x.sizes(), x.options());
  args.out = out.mutable_data_ptr();
  at::Tensor workspace = new_tensor({ExpertsMemory(args).bytes}, x.options().dtype(at::kByte));
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
