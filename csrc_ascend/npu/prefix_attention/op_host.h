// Tiling of prefix_attention.
#pragma once

#include "npu/common/attention_host.h"
#include "npu/prefix_attention/params.h"

namespace ascend_npu {

struct PrefixAttentionTiling {
  AttentionParams params;
  uint32_t cores;
};

// tokens: T, which bounds the work. Raises std::invalid_argument that names the argument.
PrefixAttentionTiling tile_prefix_attention(const AttentionProblem& problem, int64_t tokens, int64_t cores);

}  // namespace ascend_npu
