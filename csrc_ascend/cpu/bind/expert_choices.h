// Arguments that all mixtures of experts have, see ops/experts.py.
#pragma once

#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"
#include "cpu/kernels/expert_rows.h"
#include "cpu/kernels/gate.h"

namespace ascend_vllm {

inline Gate gate_of(c10::string_view activation) {
  TORCH_CHECK_VALUE(activation == "silu" || activation == "gelu" || activation == "gelu_tanh",
                    "activation must be 'silu', 'gelu' or 'gelu_tanh', got '", activation, "'");
  return activation == "silu" ? Gate::kSilu : activation == "gelu" ? Gate::kGelu : Gate::kGeluTanh;
}

// Checks and sets what is said of tokens; not the experts and the result.
inline void set_choices(ExpertChoices& args, const at::Tensor& x, const at::Tensor& ids,
                        const at::Tensor& weights, const std::optional<at::Tensor>& shared,
                        const std::optional<at::Tensor>& shared_gate) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got ", x.sizes());
  check_rows(x, "x");
  const int64_t tokens = x.size(0), hidden = x.size(1);
  TORCH_CHECK(ids.dim() == 2 && ids.size(0) == tokens && ids.scalar_type() == at::kInt && ids.is_contiguous(),
              "ids must be a contiguous int32 matrix of ", tokens, " rows, got ", ids.scalar_type(),
              " of shape ", ids.sizes());
  TORCH_CHECK(weights.sizes() == ids.sizes() && weights.scalar_type() == at::kFloat && weights.is_contiguous(),
              "weights must be a contiguous float tensor of shape ", ids.sizes(), ", got ",
              weights.scalar_type(), " of shape ", weights.sizes());
  const auto check_like_x = [&](const at::Tensor& tensor, const char* name, int64_t width) {
    check_same_dtype(tensor, name, x);
    TORCH_CHECK(
        tensor.dim() == 2 && tensor.size(0) == tokens && tensor.size(1) == width && tensor.is_contiguous(),
        name, " must be contiguous, of shape [", tokens, ", ", width, "], got ", tensor.sizes());
    return tensor.const_data_ptr();
  };
  if (shared.has_value()) args.shared = check_like_x(*shared, "shared", hidden);
  if (shared_gate.has_value()) args.shared_gate = check_like_x(*shared_gate, "shared_gate", 1);
  args.dtype = dtype_of(x, "x");
  args.x = x.const_data_ptr();
  args.ids = ids.const_data_ptr<int32_t>();
  args.weights = weights.const_data_ptr<float>();
  args.tokens = tokens;
  args.hidden = hidden;
  args.x_stride = x.stride(0);
  args.choices = ids.size(1);
}

}  // namespace ascend_vllm
