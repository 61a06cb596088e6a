// Parameters of lora_shrink; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

struct LoraShrinkParams {
  int32_t tokens;
  int32_t hidden;  // inputs of an adapter
  int32_t rank;
  int32_t tile_ranks;   // rows of an adapter that a core computes at a time
  int32_t tile_hidden;  // inputs in the unified buffer at a time
  int32_t x_stride;     // elements from a token to the next one
  float scale;
};

}  // namespace ascend_npu
