// Bindings of sampling and of LoRA.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "npu/bind/device.h"
#include "npu/edit_and_sample/op_host.h"
#include "npu/lora_expand/op_host.h"
#include "npu/lora_shrink/op_host.h"

namespace ascend_npu {
namespace {

void check_rows(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t rows) {
  check_dense(tensor, name, type);
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.size(0) == rows, name, " must have ", rows, " entries, got ",
                    tensor.sizes());
}

// Raises ValueError unless x and y are matrices of as many tokens as there are adapters, columns contiguous.
void check_lora(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& adapters,
                const at::Tensor& order, const at::Tensor& y) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.stride(1) == 1, "x must be a matrix with contiguous rows");
  TORCH_CHECK_VALUE(y.dim() == 2 && y.stride(1) == 1, "y must be a matrix with contiguous rows");
  TORCH_CHECK_VALUE(weights.dim() == 3 && weights.is_contiguous(),
                    "weights must be [adapters, …, …], contiguous");
  TORCH_CHECK_VALUE(y.size(0) == x.size(0), "x and y must have as many rows");
  check_rows(adapters, "adapters", at::kLong, x.size(0));
  check_rows(order, "order", at::kLong, x.size(0));
}

int64_t row_stride(const at::Tensor& matrix) { return matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1); }

void lora_shrink(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& adapters,
                 const at::Tensor& order, const at::Tensor& y, double scale) {
  check_lora(x, weights, adapters, order, y);
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
    launch_lora_shrink(type, tiling.cores, stream, address(x), address(weights), address(adapters),
                       address(order), address(y), address(params));
  });
}

void lora_expand(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& adapters,
                 const at::Tensor& order, const at::Tensor& y, int64_t offset) {
  check_lora(x, weights, adapters, order, y);
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
    launch_lora_expand(type, tiling.cores, stream, address(x), address(weights), address(adapters),
                       address(order), address(y), address(params));
  });
}

LogitType logit_type(const at::Tensor& logits) {
  const at::ScalarType type = logits.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                    "logits must be float32, float16 or bfloat16, got ", type);
  return type == at::kFloat  ? LogitType::kFloat32
         : type == at::kHalf ? LogitType::kFloat16
                             : LogitType::kBFloat16;
}

at::Tensor edit_and_sample(const at::Tensor& logits, const at::Tensor& counts, const at::Tensor& count_rows,
                           const at::Tensor& fresh_ids, const at::Tensor& repetition,
                           const at::Tensor& frequency, const at::Tensor& presence, const at::Tensor& bitmask,
                           const at::Tensor& mask_rows, const at::Tensor& temperature, const at::Tensor& top_k,
                           const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& seeds,
                           const at::Tensor& positions, int64_t nothing) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.stride(1) == 1, "logits must be a matrix with contiguous rows");
  const LogitType type = logit_type(logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check_dense(counts, "counts", at::kShort);
  TORCH_CHECK_VALUE(counts.dim() == 2 && counts.size(1) == vocab,
                    "counts must have a column for each token, got ", counts.sizes());
  check_dense(bitmask, "bitmask", at::kInt);
  TORCH_CHECK_VALUE(bitmask.dim() == 2, "bitmask must be a matrix, got ", bitmask.sizes());
  for (const auto& [tensor, name] :
       {std::pair(count_rows, "count_rows"), std::pair(fresh_ids, "fresh_ids"),
        std::pair(mask_rows, "mask_rows"), std::pair(seeds, "seeds"), std::pair(positions, "positions")})
    check_rows(tensor, name, at::kLong, rows);
  for (const auto& [tensor, name] :
       {std::pair(repetition, "repetition"), std::pair(frequency, "frequency"), std::pair(presence, "presence"),
        std::pair(temperature, "temperature"), std::pair(top_p, "top_p"), std::pair(min_p, "min_p")})
    check_rows(tensor, name, at::kFloat, rows);
  check_rows(top_k, "top_k", at::kInt, rows);
  at::Tensor ids = at::empty({rows}, seeds.options());
  if (rows == 0) return ids;
  const auto tiling = tiled([&] {
    return tile_edit_and_sample(rows, vocab, row_stride(logits), bitmask.size(1), nothing,
                                vector_cores(logits));
  });
  enqueue("ascend_vllm_edit_and_sample", [=, params = place(tiling.params, logits)](void* stream) {
    launch_edit_and_sample(
        type, tiling.cores, stream,
        {address(logits), address(counts), address(count_rows), address(fresh_ids), address(repetition),
         address(frequency), address(presence), address(bitmask), address(mask_rows), address(temperature),
         address(top_k), address(top_p), address(min_p), address(seeds), address(positions), address(ids)},
        address(params));
  });
  return ids;
}

}  // namespace
}  // namespace ascend_npu

TORCH_LIBRARY_IMPL(ascend_vllm_npu, PrivateUse1, m) {
  m.impl("lora_shrink", &ascend_npu::lora_shrink);
  m.impl("lora_expand", &ascend_npu::lora_expand);
  m.impl("edit_and_sample", &ascend_npu::edit_and_sample);
}
