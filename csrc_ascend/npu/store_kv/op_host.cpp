#include "npu/store_kv/op_host.h"

namespace ascend_npu {

StoreKvTiling tile_store_kv(const StoreKvProblem& problem, int64_t cores) {
  const KvStrides strides = kv_strides(problem.layout, problem.kv_heads, problem.block_size, problem.head_size);
  const int64_t width = problem.kv_heads * problem.head_size;
  check_range(problem.tokens, 0, 1 << 30, "tokens");
  check(problem.key_stride >= width, "key_stride", "tokens overlap");
  check(problem.value_stride >= width, "value_stride", "tokens overlap");
  // two buffers of 16-bit elements
  const int64_t fitting = kUnifiedBufferBytes / (2 * 2 * width);
  check(fitting >= 1, "kv_heads", "a token's heads do not fit into the unified buffer");
  // small tiles, so that short steps use all cores; 16 tokens are enough for an efficient copy
  int64_t tile = (problem.tokens + cores - 1) / cores;
  tile = tile < 1 ? 1 : tile > 16 ? 16 : tile;
  tile = tile > fitting ? fitting : tile;
  // a token is one segment if its heads are contiguous
  const bool whole = problem.layout == KvLayout::kBlockTokenHead;
  StoreKvTiling tiling{};
  tiling.params.tokens = field(problem.tokens, "tokens");
  tiling.params.tile_tokens = field(tile, "tokens");
  tiling.params.width = field(width, "kv_heads");
  tiling.params.key_stride = field(problem.key_stride, "key_stride");
  tiling.params.value_stride = field(problem.value_stride, "value_stride");
  tiling.params.block_size = field(problem.block_size, "block_size");
  tiling.params.segment_length = whole ? field(width, "kv_heads") : strides.segment_length;
  tiling.params.segment_count = field(width, "kv_heads") / tiling.params.segment_length;
  tiling.params.segment_stride = problem.layout == KvLayout::kBlockHeadToken ? strides.head : strides.segment;
  if (whole) tiling.params.segment_stride = tiling.params.segment_length;
  tiling.params.token_stride = strides.token;
  tiling.params.block_stride = strides.block;
  tiling.cores = cores_for((problem.tokens + tile - 1) / tile, cores);
  return tiling;
}

}  // namespace ascend_npu
