// Copies keys and values into a paged cache; the dtype does not matter, so sizes are in bytes.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct StoreKvArgs {
  const char* key;    // token t, head k starts at t * key_token_bytes + k * key_head_bytes
  const char* value;  // likewise
  char* key_cache;    // [P, K, S, D]
  char* value_cache;
  const int64_t* slots;  // [tokens], block * S + offset; negative: skip
  int64_t tokens, kv_heads, block_size;
  int64_t head_bytes;  // D elements
  int64_t key_token_bytes, key_head_bytes, value_token_bytes, value_head_bytes;
};

ASCEND_VLLM_KERNEL(store_kv, StoreKvArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {

ASCEND_VLLM_DEFINE_KERNEL(store_kv, StoreKvArgs) {
  const StoreKvArgs a = args;
  // a copy moves about sixteen bytes in the time of an elementary operation
  parallel_for(a.tokens, 2 * a.kv_heads * a.head_bytes / 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a.slots[t];
      if (slot < 0) continue;
      const int64_t block = slot / a.block_size, offset = slot % a.block_size;
      for (int64_t k = 0; k < a.kv_heads; ++k) {
        const int64_t to = ((block * a.kv_heads + k) * a.block_size + offset) * a.head_bytes;
        __builtin_memcpy(a.key_cache + to, a.key + t * a.key_token_bytes + k * a.key_head_bytes, a.head_bytes);
        __builtin_memcpy(a.value_cache + to, a.value + t * a.value_token_bytes + k * a.value_head_bytes,
                         a.head_bytes);
      }
    }
  });
}

}  // namespace ascend_vllm

#endif
