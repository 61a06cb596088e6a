// Parameters of advance_step; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

struct AdvanceStepParams {
  int32_t rows;
  int32_t tile_rows;  // rows in the unified buffer at a time
  int32_t block_size;
  int32_t max_blocks;  // columns of the block table
};

}  // namespace ascend_npu
