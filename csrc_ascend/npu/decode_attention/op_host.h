// Tiling of decode_attention.
#pragma once

#include "npu/common/attention_host.h"
#include "npu/decode_attention/params.h"

namespace ascend_npu {

struct DecodeAttentionTiling {
  AttentionParams params;
  uint32_t cores, merge_cores;
  int64_t workspace_bytes;  // of the parts' partial results
};

// Raises std::invalid_argument that names the argument.
DecodeAttentionTiling tile_decode_attention(const AttentionProblem& problem, int64_t cores);

}  // namespace ascend_npu
