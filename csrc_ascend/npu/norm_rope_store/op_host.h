// Tiling of norm_rope_store.
#pragma once

#include "npu/common/host.h"
#include "npu/norm_rope_store/params.h"

namespace ascend_npu {

struct NormRopeStoreTiling {
  NormRopeStoreParams params;
  uint32_t cores;
};

// Raises std::invalid_argument that names the argument.
NormRopeStoreTiling tile_norm_rope_store(const NormRopeStoreParams& params, int64_t cores);

}  // namespace ascend_npu
