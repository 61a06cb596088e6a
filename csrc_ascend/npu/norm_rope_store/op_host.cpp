#include "npu/norm_rope_store/op_host.h"

namespace ascend_npu {

NormRopeStoreTiling tile_norm_rope_store(const NormRopeStoreParams& params, int64_t cores) {
  const int64_t size = params.head_size, heads = params.heads + params.kv_heads, all = heads + params.kv_heads;
  check_range(params.tokens, 0, 1 << 30, "tokens");
  check_range(params.heads, 1, 256, "heads");
  check_range(params.kv_heads, 1, params.heads, "kv_heads");
  check(size >= 16 && size <= 256 && size % 16 == 0, "head_size",
        std::to_string(size) + " is not a multiple of 16 from 16 to 256");
  check(params.rotated >= 16 && params.rotated <= size && params.rotated % 16 == 0, "rotated",
        std::to_string(params.rotated) + " is not a multiple of 16 from 16 to the head size");
  check(params.query_stride >= params.heads * size, "query_stride", "tokens overlap");
  check(params.key_stride >= params.kv_heads * size, "key_stride", "tokens overlap");
  check(params.value_stride >= params.kv_heads * size, "value_stride", "tokens overlap");
  // queries, keys and values of 16 bits, double-buffered in and out; as floats, without the values; two
  // products of 64 lanes for each head; sums, broadcast ones, weights and angles
  const int64_t padded = (heads + 7) / 8 * 8;
  const int64_t bytes = all * size * 2 * 4 + heads * size * 4 + padded * (2 * 64 + 1 + 8) * 4 + size * 3 * 4 +
                        params.rotated * 4 * 2 + 512;
  check(bytes <= kUnifiedBufferBytes && heads <= 255, "heads",
        "a token's heads do not fit into the unified buffer");
  return {params, cores_for(params.tokens, cores)};
}

}  // namespace ascend_npu
