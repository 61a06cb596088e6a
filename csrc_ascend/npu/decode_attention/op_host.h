// Tiling and launch of decode_attention.
#pragma once

#include "npu/common/attention_host.h"

namespace ascend_npu {

struct DecodeAttentionTiling {
  AttentionParams params;
  uint32_t cores, merge_cores;
  int64_t workspace_bytes;  // of the parts' partial results
};

// Raises std::invalid_argument that names the argument.
DecodeAttentionTiling tile_decode_attention(const AttentionProblem& problem, int64_t cores);

// query: one token of each row; block_table: [R, B] int32; seq_lens: [R] int32, that token included, 0 for a
// row that is not there; output: [R, N, D]; tiling: the params in global memory. Two kernels, one after the
// other.
void launch_decode_attention(DataType type, const DecodeAttentionTiling& tiled, void* stream, uint8_t* query,
                             uint8_t* key_cache, uint8_t* value_cache, uint8_t* block_table, uint8_t* seq_lens,
                             uint8_t* workspace, uint8_t* output, uint8_t* tiling);

}  // namespace ascend_npu
