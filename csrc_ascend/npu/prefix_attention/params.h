// Parameters and launch of prefix_attention; host and device.
#pragma once

#include "npu/common/attention_params.h"
#include "npu/common/types.h"

namespace ascend_npu {

// block_table: [R, B] int32; query_start: [R+1] int32; seq_lens: [R] int32, with the step's tokens; output:
// [T, N, D], written for tokens of rows only; tiling: the params in global memory.
void launch_prefix_attention(DataType type, uint32_t cores, void* stream, uint8_t* query, uint8_t* key_cache,
                             uint8_t* value_cache, uint8_t* block_table, uint8_t* query_start,
                             uint8_t* seq_lens, uint8_t* output, uint8_t* tiling);

}  // namespace ascend_npu
