// The layout of a paged KV cache, the same for every device; no framework headers.
//
// One layer's cache is [2, P, K, S, D]: keys then values, P pages (blocks) of S token slots each, K key-value
// heads, D elements per head. A slot mapping has page * S + offset for each token; negative means "do not
// store".
#pragma once

#include <cstdint>

namespace ascend_vllm {

struct PagedKvLayout {
  int64_t num_kv_heads;  // K
  int64_t block_size;    // S
  int64_t head_size;     // D
  int64_t page_stride;   // elements from a page to the next one
  int64_t head_stride;   // elements from a head to the next one inside a page; slots are head_size apart
};

}  // namespace ascend_vllm
