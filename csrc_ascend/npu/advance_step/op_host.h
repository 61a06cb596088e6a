// Tiling of advance_step.
#pragma once

#include "npu/advance_step/params.h"
#include "npu/common/host.h"

namespace ascend_npu {

struct AdvanceStepTiling {
  AdvanceStepParams params;
  uint32_t cores;
};

// Raises std::invalid_argument that names the argument.
AdvanceStepTiling tile_advance_step(int64_t rows, int64_t block_size, int64_t max_blocks, int64_t cores);

}  // namespace ascend_npu
