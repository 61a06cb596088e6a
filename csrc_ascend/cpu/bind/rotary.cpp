#include "cpu/kernels/rotary.h"

#include "cpu/bind/paged.h"
#include "cpu/bind/tape.h"

namespace ascend_vllm {
namespace {

void check_heads(const at::Tensor& rows, const char* name, const at::Tensor& positions, int64_t head_size) {
  TORCH_CHECK(rows.dim() == 2 && rows.size(0) == positions.size(0) && rows.size(1) % head_size == 0, name,
              " must be [", positions.size(0), ", a multiple of ", head_size, "], got ", rows.sizes());
  check_rows(rows, name);
}

RotaryArgs rotary_args(const at::Tensor& positions, const at::Tensor& query, const at::Tensor& key,
                       int64_t head_size, const at::Tensor& cos_sin_cache, bool is_neox) {
  TORCH_CHECK(head_size > 0, "head_size must be positive, got ", head_size);
  check_vector(positions, "positions", at::kLong, positions.numel());
  check_heads(query, "query", positions, head_size);
  check_heads(key, "key", positions, head_size);
  check_same_dtype(key, "key", query);
  TORCH_CHECK(cos_sin_cache.dim() == 2 && cos_sin_cache.scalar_type() == at::kFloat &&
                  cos_sin_cache.is_contiguous() && cos_sin_cache.size(1) % 2 == 0 &&
                  cos_sin_cache.size(1) <= head_size,
              "cos_sin_cache must be a contiguous float32 matrix with an even number of columns, at most ",
              head_size, ", got ", cos_sin_cache.scalar_type(), " of shape ", cos_sin_cache.sizes());
  return {
      .dtype = dtype_of(query, "query"),
      .positions = positions.const_data_ptr<int64_t>(),
      .rows = {query.mutable_data_ptr(), key.mutable_data_ptr()},
      .strides = {query.stride(0), key.stride(0)},
      .heads = {query.size(1) / head_size, key.size(1) / head_size},
      .cos_sin = cos_sin_cache.const_data_ptr<float>(),
      .tokens = positions.size(0),
      .head_size = head_size,
      .rot_dim = cos_sin_cache.size(1),
      .is_neox = is_neox,
  };
}

void rotary_embedding(const at::Tensor& positions, const at::Tensor& query, const at::Tensor& key,
                      int64_t head_size, const at::Tensor& cos_sin_cache, bool is_neox) {
  const RotaryArgs args = rotary_args(positions, query, key, head_size, cos_sin_cache, is_neox);
  launch([args, num_positions = cos_sin_cache.size(0)] {
    check_positions(args.positions, args.tokens, num_positions);
    rotary_embedding_kernel(args);
  });
}

void rotary_store_kv(const at::Tensor& positions, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& cos_sin_cache, bool is_neox,
                     const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slot_mapping,
                     const std::optional<at::Tensor>& key_scales, const std::optional<at::Tensor>& value_scales,
                     double k_scale, double v_scale) {
  TORCH_CHECK(key_cache.dim() == 4, "key_cache must have four dimensions, got shape ", key_cache.sizes());
  const int64_t head_size = key_cache.size(3);
  const RotaryArgs rotary = rotary_args(positions, query, key, head_size, cos_sin_cache, is_neox);
  TORCH_CHECK(value.sizes() == key.sizes(), "value must be of key's shape ", key.sizes(), ", got ",
              value.sizes());
  check_rows(value, "value");
  check_same_dtype(value, "value", key);
  const PagedCache cache =
      paged_cache(key_cache, value_cache, key, head_size, {key_scales, value_scales, k_scale, v_scale});
  TORCH_CHECK(cache.kv_heads == rotary.heads[1], "key_cache must have ", rotary.heads[1], " KV heads, got ",
              cache.kv_heads);
  check_vector(slot_mapping, "slot_mapping", at::kLong, rotary.tokens);
  const RotaryStoreArgs args{
      .rotary = rotary,
      .value = value.const_data_ptr(),
      .value_stride = value.stride(0),
      .cache = cache,
      .slots = slot_mapping.const_data_ptr<int64_t>(),
  };
  launch([args, num_positions = cos_sin_cache.size(0), num_slots = key_cache.size(0) * key_cache.size(2)] {
    check_positions(args.rotary.positions, args.rotary.tokens, num_positions);
    check_slots(args.slots, args.rotary.tokens, num_slots);
    rotary_store_kv_kernel(args);
  });
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("rotary_embedding", &ascend_vllm::rotary_embedding);
  m.impl("rotary_store_kv", &ascend_vllm::rotary_store_kv);
}
