// Bindings of ops on the paged KV cache.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "npu/bind/device.h"
#include "npu/decode_attention/op_host.h"
#include "npu/prefix_attention/op_host.h"
#include "npu/store_kv/op_host.h"

namespace ascend_npu {
namespace {

// Layout and block size of a layer's caches.
struct Caches {
  KvLayout layout;
  int64_t block_size;
};

Caches check_caches(const at::Tensor& key_cache, const at::Tensor& value_cache, c10::string_view layout,
                    int64_t kv_heads, int64_t head_size, at::ScalarType type) {
  TORCH_CHECK_VALUE(layout == "ND" || layout == "NZ", "layout must be 'ND' or 'NZ', got '", layout, "'");
  check_dense(key_cache, "key_cache", type);
  check_dense(value_cache, "value_cache", type);
  TORCH_CHECK_VALUE(key_cache.sizes() == value_cache.sizes(), "key_cache and value_cache differ in shape");
  TORCH_CHECK_VALUE(key_cache.dim() == 4, "key_cache must have four dimensions, got ", key_cache.sizes());
  const bool is_nz = layout == "NZ";
  const bool fits = is_nz ? key_cache.size(1) * 16 == kv_heads * head_size && key_cache.size(3) == 16
                          : key_cache.size(2) == kv_heads && key_cache.size(3) == head_size;
  TORCH_CHECK_VALUE(fits, "key_cache has shape ", key_cache.sizes(), ", not that of a ", layout, " cache of ",
                    kv_heads, " heads of ", head_size);
  return {is_nz ? KvLayout::kFractalNz : KvLayout::kBlockTokenHead,
          is_nz ? key_cache.size(2) : key_cache.size(1)};
}

void check_tokens(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 3, name, " must be [tokens, heads, head size], got ", tensor.sizes());
  TORCH_CHECK_VALUE(tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2), name,
                    "'s heads must be contiguous");
}

// The stride of a single token's dimension may be anything.
int64_t token_stride(const at::Tensor& tensor) {
  return tensor.size(0) > 1 ? tensor.stride(0) : tensor.size(1) * tensor.size(2);
}

void store_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& slot_mapping, c10::string_view layout) {
  check_tokens(key, "key");
  check_tokens(value, "value");
  data_type(key, "key");
  TORCH_CHECK_VALUE(value.sizes() == key.sizes() && value.scalar_type() == key.scalar_type(),
                    "value must have key's shape and dtype");
  check_dense(slot_mapping, "slot_mapping", at::kLong);
  TORCH_CHECK_VALUE(slot_mapping.numel() == key.size(0), "slot_mapping must have an entry for each token");
  const Caches caches =
      check_caches(key_cache, value_cache, layout, key.size(1), key.size(2), key.scalar_type());
  if (key.size(0) == 0) return;
  const auto tiling = tiled([&] {
    return tile_store_kv({key.size(0), key.size(1), key.size(2), caches.block_size, token_stride(key),
                          token_stride(value), caches.layout},
                         vector_cores(key));
  });
  enqueue("ascend_vllm_store_kv", [=, params = place(tiling.params, key)](void* stream) {
    launch_store_kv(tiling.cores, stream, address(key), address(value), address(slot_mapping),
                    address(key_cache), address(value_cache), address(params));
  });
}

AttentionProblem check_attention(const at::Tensor& query, const at::Tensor& key_cache,
                                 const at::Tensor& value_cache, const at::Tensor& block_table,
                                 const at::Tensor& seq_lens, double scale, int64_t sliding_window,
                                 int64_t num_kv_heads, c10::string_view layout) {
  check_tokens(query, "query");
  check_dense(block_table, "block_table", at::kInt);
  check_dense(seq_lens, "seq_lens", at::kInt);
  TORCH_CHECK_VALUE(block_table.dim() == 2 && block_table.size(0) == seq_lens.numel(),
                    "block_table must have a row for each entry of seq_lens");
  const Caches caches =
      check_caches(key_cache, value_cache, layout, num_kv_heads, query.size(2), query.scalar_type());
  return {seq_lens.numel(),          query.size(1),       num_kv_heads,        query.size(2),
          caches.block_size,         block_table.size(1), token_stride(query), sliding_window,
          static_cast<float>(scale), caches.layout};
}

at::Tensor prefix_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                            const at::Tensor& block_table, const at::Tensor& query_start,
                            const at::Tensor& seq_lens, double scale, int64_t sliding_window,
                            int64_t num_kv_heads, c10::string_view layout) {
  const DataType type = data_type(query, "query");
  const AttentionProblem problem = check_attention(query, key_cache, value_cache, block_table, seq_lens, scale,
                                                   sliding_window, num_kv_heads, layout);
  check_dense(query_start, "query_start", at::kInt);
  TORCH_CHECK_VALUE(query_start.numel() == problem.rows + 1,
                    "query_start must have one entry more than seq_lens");
  // tokens that belong to no row stay zero
  at::Tensor output = at::zeros(query.sizes(), query.options());
  if (query.size(0) == 0 || problem.rows == 0) return output;
  const auto tiling = tiled([&] { return tile_prefix_attention(problem, query.size(0), vector_cores(query)); });
  enqueue("ascend_vllm_prefix_attention", [=, params = place(tiling.params, query)](void* stream) {
    launch_prefix_attention(type, tiling.cores, stream, address(query), address(key_cache),
                            address(value_cache), address(block_table), address(query_start), address(seq_lens),
                            address(output), address(params));
  });
  return output;
}

at::Tensor decode_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                            const at::Tensor& block_table, const at::Tensor& seq_lens, double scale,
                            int64_t sliding_window, int64_t num_kv_heads, c10::string_view layout) {
  const DataType type = data_type(query, "query");
  const AttentionProblem problem = check_attention(query, key_cache, value_cache, block_table, seq_lens, scale,
                                                   sliding_window, num_kv_heads, layout);
  TORCH_CHECK_VALUE(query.size(0) == problem.rows, "query must have one token for each entry of seq_lens");
  at::Tensor output = at::empty(query.sizes(), query.options());
  if (problem.rows == 0) return output;
  const auto tiling = tiled([&] { return tile_decode_attention(problem, vector_cores(query)); });
  const at::Tensor workspace = at::empty({tiling.workspace_bytes}, query.options().dtype(at::kByte));
  enqueue("ascend_vllm_decode_attention", [=, params = place(tiling.params, query)](void* stream) {
    launch_decode_attention(type, tiling.cores, tiling.merge_cores, stream, address(query), address(key_cache),
                            address(value_cache), address(block_table), address(seq_lens), address(workspace),
                            address(output), address(params));
  });
  return output;
}

}  // namespace
}  // namespace ascend_npu

TORCH_LIBRARY_IMPL(ascend_vllm_npu, PrivateUse1, m) {
  m.impl("store_kv", &ascend_npu::store_kv);
  m.impl("prefix_attention", &ascend_npu::prefix_attention);
  m.impl("decode_attention", &ascend_npu::decode_attention);
}
