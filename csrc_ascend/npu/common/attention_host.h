// Tiling shared by the attention kernels. Host code.
#pragma once

#include "npu/common/attention_params.h"
#include "npu/common/kv_layout.h"

namespace ascend_npu {

// query: [T, N, D], heads contiguous, tokens query_stride elements apart; cache of `layout`.
struct AttentionProblem {
  int64_t rows, heads, kv_heads, head_size, block_size, max_blocks, query_stride, window;
  float scale;
  KvLayout layout;
};

// Bytes of the unified buffer that AttentionTile's constructor allocates.
inline int64_t attention_bytes(int64_t keys, int64_t queries, int64_t head_size, int64_t out_bytes) {
  const int64_t longer = keys > queries ? keys : queries;
  const int64_t floats = keys * head_size + longer * 64 + 2 * queries * head_size + queries * keys + keys * 8 +
                         keys + 4 * queries * 8 + queries;
  return 2 * longer * head_size * 2 + 2 * out_bytes + floats * 4 + 32;
}

// The largest tiles that fit; raises std::invalid_argument that names the argument.
inline AttentionParams tile_attention(const AttentionProblem& problem, int64_t out_bytes) {
  check_range(problem.rows, 0, 1 << 24, "rows");
  check_range(problem.heads, 1, 1024, "heads");
  check_range(problem.max_blocks, 1, 1 << 24, "max_blocks");
  check_range(problem.window, 0, 1 << 30, "window");
  AttentionParams params{};
  params.cache = kv_strides(problem.layout, problem.kv_heads, problem.block_size, problem.head_size);
  check(problem.heads % problem.kv_heads == 0, "heads", "not a multiple of kv_heads");
  check(problem.query_stride >= problem.heads * problem.head_size, "query_stride", "tokens overlap");
  params.rows = field(problem.rows, "rows");
  params.heads = field(problem.heads, "heads");
  params.kv_heads = field(problem.kv_heads, "kv_heads");
  params.head_size = field(problem.head_size, "head_size");
  params.block_size = field(problem.block_size, "block_size");
  params.max_blocks = field(problem.max_blocks, "max_blocks");
  params.query_stride = field(problem.query_stride, "query_stride");
  params.window = field(problem.window, "window");
  params.scale = problem.scale;
  struct Tile {
    int32_t keys, queries;
  };
  // a tile of keys does not cross blocks, so it need not be longer than a block
  for (const Tile tile : {Tile{128, 16}, Tile{64, 16}, Tile{64, 8}}) {
    params.tile_keys = tile.keys;
    params.tile_queries = tile.queries;
    if ((tile.keys == 64 || tile.keys <= problem.block_size) &&
        attention_bytes(tile.keys, tile.queries, problem.head_size, out_bytes) <= kUnifiedBufferBytes)
      return params;
  }
  check(false, "head_size", "no tile fits into the unified buffer");
  return params;
}

}  // namespace ascend_npu
