#include "npu/lora_expand/op_host.h"

namespace ascend_npu {

LoraExpandTiling tile_lora_expand(const LoraExpandProblem& problem, int64_t cores) {
  check_range(problem.tokens, 0, 1 << 24, "tokens");
  check(problem.rank >= 8 && problem.rank % 8 == 0 && problem.rank <= 512, "rank",
        std::to_string(problem.rank) + " is not a multiple of 8 up to 512");
  check_range(problem.outputs, 1, 1 << 24, "outputs");
  check_range(problem.y_offset, 0, 1 << 30, "y_offset");
  check(problem.y_stride >= problem.y_offset + problem.outputs, "y_stride", "tokens overlap");
  // bytes per output: its weights, double-buffered, and as floats; 64 products; two sums; y in and out,
  // double-buffered
  const int64_t bytes_of_output = problem.rank * (2 * 2 + 4) + 64 * 4 + 2 * 4 + 4 * 2;
  int32_t tile = 128;
  while (tile * bytes_of_output + 2 * problem.rank * 4 + 1024 > kUnifiedBufferBytes) tile /= 2;
  LoraExpandTiling tiling{};
  tiling.params = {field(problem.tokens, "tokens"),     field(problem.rank, "rank"),
                   field(problem.outputs, "outputs"),   tile,
                   field(problem.y_stride, "y_stride"), field(problem.y_offset, "y_offset")};
  tiling.cores =
      cores_for((problem.tokens + kRunTokens - 1) / kRunTokens * ((problem.outputs + tile - 1) / tile), cores);
  return tiling;
}

}  // namespace ascend_npu
