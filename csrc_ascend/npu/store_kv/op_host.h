// Tiling of store_kv.
#pragma once

#include "npu/common/kv_layout.h"
#include "npu/store_kv/params.h"

namespace ascend_npu {

// key, value: [T, K, D] of 16-bit elements, heads contiguous, tokens key_stride and value_stride elements
// apart.
struct StoreKvProblem {
  int64_t tokens, kv_heads, head_size, block_size, key_stride, value_stride;
  KvLayout layout;
};

struct StoreKvTiling {
  StoreKvParams params;
  uint32_t cores;
};

// `cores`: vector cores of the chip. Raises std::invalid_argument that names the argument.
StoreKvTiling tile_store_kv(const StoreKvProblem& problem, int64_t cores);

}  // namespace ascend_npu
