// Parameters and launch of lora_expand; host and device.
#pragma once

#include "npu/common/types.h"

namespace ascend_npu {

struct LoraExpandParams {
  int32_t tokens;
  int32_t rank;
  int32_t outputs;       // of an adapter
  int32_t tile_outputs;  // that a core computes at a time
  int32_t y_stride;      // elements from a token to the next one
  int32_t y_offset;      // of the adapters' first output in a token
};

// adapters: [T] int64, negative: none; order: [T] int64, the tokens, each once, sorted by adapter (otherwise
// adapters are read more often); y: of `type`, as weights are.
void launch_lora_expand(DataType type, uint32_t cores, void* stream, uint8_t* x, uint8_t* weights,
                        uint8_t* adapters, uint8_t* order, uint8_t* y, uint8_t* tiling);

}  // namespace ascend_npu
