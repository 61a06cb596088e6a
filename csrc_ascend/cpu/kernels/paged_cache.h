// One layer's paged cache of keys and values, as its kernels see it; no code of an instruction set.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace ascend_vllm {

// Maximum head size of a cache of bytes.
constexpr int64_t kMaxHeadSize = 256;

// Key s of head k of block b starts at element (b * kv_heads + k) * head_stride + s * head_size of `keys`, its
// own scale is element (b * kv_heads + k) * scale_head_stride + s of `key_scales`; likewise values.
struct PagedCache {
  CacheFormat format;
  int64_t kv_heads, block_size, head_size;
  void* keys;
  void* values;
  int64_t head_stride;
  bfloat16* key_scales;  // null: numbers have no scales of their own
  bfloat16* value_scales;
  int64_t scale_head_stride;
  float key_scale, value_scale;  // of all numbers; 1 if they have scales of their own
};

}  // namespace ascend_vllm
