// Tiling of lora_shrink.
#pragma once

#include "npu/common/host.h"
#include "npu/common/run_tokens.h"
#include "npu/lora_shrink/params.h"

namespace ascend_npu {

// x: [T, H], tokens x_stride elements apart; weights: [adapters, rank, H], contiguous.
struct LoraShrinkProblem {
  int64_t tokens, hidden, rank, x_stride;
  float scale;
};

struct LoraShrinkTiling {
  LoraShrinkParams params;
  uint32_t cores;
};

// Raises std::invalid_argument that names the argument.
LoraShrinkTiling tile_lora_shrink(const LoraShrinkProblem& problem, int64_t cores);

}  // namespace ascend_npu
