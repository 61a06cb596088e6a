// Tiling of penalties.
#pragma once

#include "npu/common/host.h"
#include "npu/penalties/params.h"

namespace ascend_npu {

struct PenaltiesTiling {
  PenaltiesParams params;
  uint32_t cores;
};

// Raises std::invalid_argument that names the argument.
PenaltiesTiling tile_penalties(int64_t rows, int64_t vocab, int64_t logits_stride, int64_t length,
                               int64_t cores);

}  // namespace ascend_npu
