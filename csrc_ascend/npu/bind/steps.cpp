// Bindings of penalties and of LoRA.
#include <torch/library.h>

#include "npu/bind/device.h"
#include "npu/lora_expand/op_host.h"
#include "npu/lora_shrink/op_host.h"
#include "npu/penalties/op_host.h"

namespace ascend_npu {
namespace {

void check_rows(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t rows) {
  check_dense(tensor, name, type);
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.size(0) == rows, name, " must have ", rows, " entries, got ",
                    tensor.sizes());
}

// Raises ValueError unless x and y are matrices of as many tokens as there are adapters, columns contiguous.
void check_lora(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& adapters,
                const at::Tensor& y) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.stride(1) == 1, "x must be a matrix with contiguous rows");
  TORCH_CHECK_VALUE(y.dim() == 2 && y.stride(1) == 1, "y must be a matrix with contiguous rows");
  TORCH_CHECK_VALUE(weights.dim() == 3 && weights.is_contiguous(),
                    "weights must be [adapters, …, …], contiguous");
  TORCH_CHECK_VALUE(y.size(0) == x.size(0), "x and y must have as many rows");
  check_rows(adapters, "adapters", at::kLong, x.size(0));
}

int64_t row_stride(const at::Tensor& matrix) { return matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1); }

void lora_shrink(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& adapters,
                 const at::Tensor& y, double scale) {
  check_lora(x, weights, adapters, y);
  const DataType type = data_type(x, "x");
  TORCH_CHECK_VALUE(weights.scalar_type() == x.scalar_type(), "weights must have x's dtype");
  check_dense(y, "y", at::kFloat);
  TORCH_CHECK_VALUE(weights.size(2) == x.size(1) && weights.size(1) == y.size(1),
                    "weights must be [adapters, y's columns, x's columns], got ", weights.sizes());
  if (x.size(0) == 0) return;
  const auto tiling = tiled([&] {
    return tile_lora_shrink({x.size(0), x.size(1), y.size(1), row_stride(x), static_cast<float>(scale)},
                            vector_cores(x));
  });
  enqueue("ascend_vllm_lora_shrink", [=, params = place(tiling.params, x)](void* stream) {
    launch_lora_shrink(type, tiling.cores, stream, address(x), address(weights), address(adapters), address(y),
                       address(params));
  });
}

void lora_expand(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& adapters,
                 const at::Tensor& y, int64_t offset) {
  check_lora(x, weights, adapters, y);
  const DataType type = data_type(y, "y");
  TORCH_CHECK_VALUE(weights.scalar_type() == y.scalar_type(), "weights must have y's dtype");
  check_dense(x, "x", at::kFloat);
  TORCH_CHECK_VALUE(weights.size(2) == x.size(1), "weights must be [adapters, outputs, x's columns], got ",
                    weights.sizes());
  if (x.size(0) == 0) return;
  const auto tiling = tiled([&] {
    return tile_lora_expand({x.size(0), x.size(1), weights.size(1), row_stride(y), offset}, vector_cores(x));
  });
  enqueue("ascend_vllm_lora_expand", [=, params = place(tiling.params, x)](void* stream) {
    launch_lora_expand(type, tiling.cores, stream, address(x), address(weights), address(adapters), address(y),
                       address(params));
  });
}

void apply_penalties(const at::Tensor& logits, const at::Tensor& token_ids, const at::Tensor& slots,
                     const at::Tensor& prompt_lens, const at::Tensor& seq_lens, const at::Tensor& repetition,
                     const at::Tensor& frequency, const at::Tensor& presence) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.stride(1) == 1 && logits.scalar_type() == at::kFloat,
                    "logits must be a float32 matrix with contiguous rows");
  check_dense(token_ids, "token_ids", at::kInt);
  TORCH_CHECK_VALUE(token_ids.dim() == 2, "token_ids must be a matrix, got ", token_ids.sizes());
  const int64_t rows = logits.size(0);
  check_rows(slots, "slots", at::kLong, rows);
  check_rows(prompt_lens, "prompt_lens", at::kInt, rows);
  check_rows(seq_lens, "seq_lens", at::kInt, rows);
  check_rows(repetition, "repetition", at::kFloat, rows);
  check_rows(frequency, "frequency", at::kFloat, rows);
  check_rows(presence, "presence", at::kFloat, rows);
  if (rows == 0) return;
  const auto tiling = tiled([&] {
    return tile_penalties(rows, logits.size(1), row_stride(logits), token_ids.size(1), vector_cores(logits));
  });
  enqueue("ascend_vllm_penalties", [=, params = place(tiling.params, logits)](void* stream) {
    launch_penalties(tiling.cores, stream, address(token_ids), address(slots), address(prompt_lens),
                     address(seq_lens), address(repetition), address(frequency), address(presence),
                     address(logits), address(params));
  });
}

}  // namespace
}  // namespace ascend_npu

TORCH_LIBRARY_IMPL(ascend_vllm_npu, PrivateUse1, m) {
  m.impl("lora_shrink", &ascend_npu::lora_shrink);
  m.impl("lora_expand", &ascend_npu::lora_expand);
  m.impl("apply_penalties", &ascend_npu::apply_penalties);
}
