// Checks of a paged cache that bindings share.
#pragma once

#include <algorithm>

#include "cpu/bind/tensor.h"

namespace ascend_vllm {

// Checks the cache of keys or values, [P, K, S, D].
inline void check_cache(const at::Tensor& cache, const char* name, const at::Tensor& like, int64_t head_size) {
  check_same_dtype(cache, name, like);
  TORCH_CHECK(cache.dim() == 4 && cache.size(3) == head_size && cache.is_contiguous(), name,
              " must be a contiguous tensor [blocks, KV heads, block size, ", head_size, "], got shape ",
              cache.sizes(), " and strides ", cache.strides());
}

// Checks both halves of a layer's cache, for `kv_heads` heads.
inline void check_caches(const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& like,
                         int64_t kv_heads, int64_t head_size) {
  check_cache(key_cache, "key_cache", like, head_size);
  check_cache(value_cache, "value_cache", like, head_size);
  TORCH_CHECK(key_cache.size(1) == kv_heads && value_cache.sizes() == key_cache.sizes(),
              "key_cache and value_cache must have one shape with ", kv_heads, " KV heads, got ",
              key_cache.sizes(), " and ", value_cache.sizes());
}

// Kernels do not check slots, which are data, so this is done on every call and replay.
inline void check_slots(const int64_t* slots, int64_t tokens, int64_t num_slots) {
  int64_t greatest = -1;
  for (int64_t t = 0; t < tokens; ++t) greatest = std::max(greatest, slots[t]);
  TORCH_CHECK_INDEX(greatest < num_slots, "slot_mapping holds slot ", greatest, ", the cache has ", num_slots);
}

}  // namespace ascend_vllm
