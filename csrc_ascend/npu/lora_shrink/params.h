// Parameters and launch of lora_shrink; host and device.
#pragma once

#include "npu/common/types.h"

namespace ascend_npu {

struct LoraShrinkParams {
  int32_t tokens;
  int32_t hidden;  // inputs of an adapter
  int32_t rank;
  int32_t tile_tokens;  // that a core computes at a time, kRunTokens at most
  int32_t tile_ranks;   // rows of an adapter that a core computes at a time
  int32_t tile_hidden;  // inputs in the unified buffer at a time
  int32_t x_stride;     // elements from a token to the next one
  float scale;
};

// adapters: [T] int64, negative: none; order: [T] int64, the tokens, each once, sorted by adapter (otherwise
// adapters are read more often); y: [T, rank] float32.
void launch_lora_shrink(DataType type, uint32_t cores, void* stream, uint8_t* x, uint8_t* weights,
                        uint8_t* adapters, uint8_t* order, uint8_t* y, uint8_t* tiling);

}  // namespace ascend_npu
