#include "npu/prefix_attention/op_host.h"

namespace ascend_npu {

PrefixAttentionTiling tile_prefix_attention(const AttentionProblem& problem, int64_t tokens, int64_t cores) {
  check_range(tokens, 0, 1 << 24, "tokens");
  PrefixAttentionTiling tiling{};
  tiling.params = tile_attention(problem, problem.head_size * 2);
  const int64_t queries = tokens * problem.heads / problem.kv_heads, tile = tiling.params.tile_queries;
  // each row may start a new tile
  const int64_t tiles = (queries + tile - 1) / tile + problem.rows;
  tiling.cores = cores_for(tiles * problem.kv_heads, cores);
  return tiling;
}

}  // namespace ascend_npu
