// Tiling and launch of store_kv.
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

// slots: [T] int64, block * S + offset, negative: skipped; caches as problem.layout says; tiling: the params in
// global memory, which must outlive the kernel.
void launch_store_kv(uint32_t cores, void* stream, uint8_t* key, uint8_t* value, uint8_t* slots,
                     uint8_t* key_cache, uint8_t* value_cache, uint8_t* tiling);

}  // namespace ascend_npu
