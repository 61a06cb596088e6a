// Tiling of edit_and_sample.
#pragma once

#include "npu/common/host.h"
#include "npu/edit_and_sample/params.h"

namespace ascend_npu {

struct EditAndSampleTiling {
  EditAndSampleParams params;
  uint32_t cores;
};

// `nothing`: the id of a row whose tokens are all forbidden. Raises std::invalid_argument that names the
// argument.
EditAndSampleTiling tile_edit_and_sample(int64_t rows, int64_t vocab, int64_t logits_stride, int64_t mask_words,
                                         int64_t nothing, int64_t cores);

}  // namespace ascend_npu
