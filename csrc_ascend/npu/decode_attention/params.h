// Parameters and launch of decode_attention; host and device.
#pragma once

#include "npu/common/attention_params.h"
#include "npu/common/types.h"

namespace ascend_npu {

// query: one token of each row; block_table: [R, B] int32; seq_lens: [R] int32, that token included, 0 for
// padding rows; output: [R, N, D]; tiling: the params in global memory. Launches two kernels in order.
void launch_decode_attention(DataType type, uint32_t cores, uint32_t merge_cores, void* stream, uint8_t* query,
                             uint8_t* key_cache, uint8_t* value_cache, uint8_t* block_table, uint8_t* seq_lens,
                             uint8_t* workspace, uint8_t* output, uint8_t* tiling);

}  // namespace ascend_npu
