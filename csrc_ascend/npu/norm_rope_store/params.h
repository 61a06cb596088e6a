// Parameters and launch of norm_rope_store; host and device.
#pragma once

#include "npu/common/types.h"

namespace ascend_npu {

// Strides are in elements, from a token to the next one.
struct NormRopeStoreParams {
  int32_t tokens;
  int32_t heads;     // N, of queries
  int32_t kv_heads;  // K
  int32_t head_size;
  int32_t rotated;  // F, elements of a head that are rotated
  int32_t query_stride, key_stride, value_stride;
  int32_t norms;       // whether heads are normalised first
  int32_t keeps_keys;  // whether keys and values are written beside the cache, too
  float epsilon;
};

// Addresses of tensors on the device. weights: [D] of queries, then of keys; rows of cos_sin: [F] float32;
// slots of the caches, [P * S, K, D], negative: not stored; kept_keys, kept_values: [T, K, D].
struct NormRopeStoreTensors {
  uint8_t *query, *key, *value, *query_weight, *key_weight, *positions, *cos_sin, *slots, *query_out,
      *key_cache, *value_cache, *kept_keys, *kept_values;
};

void launch_norm_rope_store(DataType type, uint32_t cores, void* stream, const NormRopeStoreTensors& tensors,
                            uint8_t* tiling);

}  // namespace ascend_npu
