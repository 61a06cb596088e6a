// Parameters of lora_expand; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

struct LoraExpandParams {
  int32_t tokens;
  int32_t rank;
  int32_t outputs;       // of an adapter
  int32_t tile_outputs;  // that a core computes at a time
  int32_t y_stride;      // elements from a token to the next one
  int32_t y_offset;      // of the adapters' first output in a token
};

}  // namespace ascend_npu
