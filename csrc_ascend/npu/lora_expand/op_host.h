// Tiling of lora_expand.
#pragma once

#include "npu/common/host.h"
#include "npu/common/run_tokens.h"
#include "npu/lora_expand/params.h"

namespace ascend_npu {

// x: [T, rank] float32, contiguous; weights: [adapters, outputs, rank], contiguous; y: [T, …], tokens y_stride
// elements apart, of which y_offset … y_offset+outputs-1 are added to.
struct LoraExpandProblem {
  int64_t tokens, rank, outputs, y_stride, y_offset;
};

struct LoraExpandTiling {
  LoraExpandParams params;
  uint32_t cores;
};

// Raises std::invalid_argument that names the argument.
LoraExpandTiling tile_lora_expand(const LoraExpandProblem& problem, int64_t cores);

}  // namespace ascend_npu
