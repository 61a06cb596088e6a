// Parameters and launch of store_kv; host and device.
#pragma once

#include "npu/common/kv_strides.h"

namespace ascend_npu {

struct StoreKvParams {
  int32_t tokens;
  int32_t tile_tokens;   // tokens in the unified buffer at a time
  int32_t width;         // elements of a token, K * D
  int32_t key_stride;    // elements from a token of `key` to the next one
  int32_t value_stride;  // likewise of `value`
  int32_t block_size;
  int32_t segment_count;   // segments of a token in the cache
  int32_t segment_length;  // elements of each
  int32_t segment_stride;  // elements from one to the next
  int32_t token_stride;    // in the cache
  int32_t block_stride;
};

// slots: [T] int64, block * S + offset, negative: skipped; caches in problem.layout; tiling: the params in
// global memory, which must outlive the kernel.
void launch_store_kv(uint32_t cores, void* stream, uint8_t* key, uint8_t* value, uint8_t* slots,
                     uint8_t* key_cache, uint8_t* value_cache, uint8_t* tiling);

}  // namespace ascend_npu
