// Bindings of ops on the paged KV cache.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "npu/bind/device.h"
#include "npu/norm_rope_store/op_host.h"
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

// The new queries, [T, N, D]; with `keeps_keys` also keys and values, [T, K, D], otherwise none.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_rope_store(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& query_weight, const std::optional<at::Tensor>& key_weight, double epsilon,
    const at::Tensor& positions, const at::Tensor& cos_sin, const at::Tensor& key_cache,
    const at::Tensor& value_cache, const at::Tensor& slot_mapping, bool keeps_keys) {
  for (const auto& [tensor, name] :
       {std::pair(query, "query"), std::pair(key, "key"), std::pair(value, "value")}) {
    check_tokens(tensor, name);
    TORCH_CHECK_VALUE(tensor.scalar_type() == query.scalar_type() && tensor.size(0) == query.size(0) &&
                          tensor.size(2) == query.size(2),
                      name, " must have query's dtype, tokens and head size");
  }
  const DataType type = data_type(query, "query");
  const int64_t tokens = query.size(0), size = query.size(2);
  TORCH_CHECK_VALUE(value.size(1) == key.size(1), "value must have key's shape");
  check_caches(key_cache, value_cache, "ND", key.size(1), size, query.scalar_type());
  TORCH_CHECK_VALUE(query_weight.has_value() == key_weight.has_value(),
                    "query_weight and key_weight are given both or not at all");
  if (query_weight.has_value()) {
    for (const auto& [tensor, name] :
         {std::pair(*query_weight, "query_weight"), std::pair(*key_weight, "key_weight")}) {
      check_dense(tensor, name, query.scalar_type());
      TORCH_CHECK_VALUE(tensor.numel() == size, name, " must have an entry for each element of a head");
    }
  }
  check_dense(positions, "positions", at::kLong);
  check_dense(slot_mapping, "slot_mapping", at::kLong);
  TORCH_CHECK_VALUE(positions.numel() == tokens && slot_mapping.numel() == tokens,
                    "positions and slot_mapping must have an entry for each token");
  check_dense(cos_sin, "cos_sin", at::kFloat);
  TORCH_CHECK_VALUE(cos_sin.dim() == 2, "cos_sin must be a matrix, got ", cos_sin.sizes());
  at::Tensor output = at::empty(query.sizes(), query.options());
  at::Tensor keys = at::empty({keeps_keys ? tokens : 0, key.size(1), size}, key.options());
  at::Tensor values = at::empty(keys.sizes(), key.options());
  if (tokens == 0) return {output, keys, values};
  const auto tiling = tiled([&] {
    return tile_norm_rope_store(
        {field(tokens, "tokens"), field(query.size(1), "heads"), field(key.size(1), "kv_heads"),
         field(size, "head_size"), field(cos_sin.size(1), "rotated"),
         field(token_stride(query), "query_stride"), field(token_stride(key), "key_stride"),
         field(token_stride(value), "value_stride"), query_weight.has_value(), keeps_keys,
         static_cast<float>(epsilon)},
        vector_cores(query));
  });
  const at::Tensor weights[2] = {query_weight.value_or(query), key_weight.value_or(key)};
  enqueue("ascend_vllm_norm_rope_store", [=, params = place(tiling.params, query)](void* stream) {
    launch_norm_rope_store(
        type, tiling.cores, stream,
        {address(query), address(key), address(value), address(weights[0]), address(weights[1]),
         address(positions), address(cos_sin), address(slot_mapping), address(output), address(key_cache),
         address(value_cache), address(keys), address(values)},
        address(params));
  });
  return {output, keys, values};
}

}  // namespace
}  // namespace ascend_npu

TORCH_LIBRARY_IMPL(ascend_vllm_npu, PrivateUse1, m) {
  m.impl("store_kv", &ascend_npu::store_kv);
  m.impl("norm_rope_store", &ascend_npu::norm_rope_store);
}
