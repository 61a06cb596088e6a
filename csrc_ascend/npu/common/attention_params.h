// Parameters of the attention kernels; host and device.
//
// T tokens, R rows (sequences), B maximum blocks of a row, N query heads, K KV heads, D head size.
#pragma once

#include "npu/common/kv_strides.h"

namespace ascend_npu {

struct AttentionParams {
  int32_t rows;          // R
  int32_t heads;         // N
  int32_t kv_heads;      // K
  int32_t head_size;     // D
  int32_t block_size;    // tokens of a block
  int32_t max_blocks;    // B
  int32_t query_stride;  // elements from a token of the query to the next one
  int32_t window;        // positions that a token attends to, itself included; 0: all
  int32_t tile_keys;     // keys in the unified buffer at a time: 64 or 128
  int32_t tile_queries;  // (token, head) pairs processed with a KV tile at a time: 8 or 16
  int32_t split_keys;    // keys of a part, where a row's keys are split; else 0
  int32_t max_parts;     // maximum parts of a row's keys
  float scale;           // factor on query·key
  KvStrides cache;
};

}  // namespace ascend_npu
