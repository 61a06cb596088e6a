#include "npu/decode_attention/op_host.h"

namespace ascend_npu {
namespace {

// Keys of a part, whatever the batch: at least 8 tiles, and 16 parts for a row of 8192 tokens.
constexpr int32_t kSplitKeys = 512;

}  // namespace

DecodeAttentionTiling tile_decode_attention(const AttentionProblem& problem, int64_t cores) {
  DecodeAttentionTiling tiling{};
  tiling.params = tile_attention(problem, (problem.head_size + 16) * 4);
  const int64_t most_keys = problem.max_blocks * problem.block_size;
  const int64_t parts = (most_keys + kSplitKeys - 1) / kSplitKeys;
  tiling.params.split_keys = kSplitKeys;
  tiling.params.max_parts = field(parts, "max_blocks");
  tiling.cores = cores_for(problem.rows * parts * problem.kv_heads, cores);
  tiling.merge_cores = cores_for(problem.rows * problem.heads, cores);
  tiling.workspace_bytes = problem.rows * problem.heads * parts * (problem.head_size + 16) * 4;
  return tiling;
}

}  // namespace ascend_npu
