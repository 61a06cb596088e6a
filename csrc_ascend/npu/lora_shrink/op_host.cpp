#include "npu/lora_shrink/op_host.h"

namespace ascend_npu {
namespace {

constexpr int32_t kTileHidden = 256;

}  // namespace

LoraShrinkTiling tile_lora_shrink(const LoraShrinkProblem& problem, int64_t cores) {
  check_range(problem.tokens, 0, 1 << 24, "tokens");
  check(problem.hidden >= 16 && problem.hidden % 16 == 0 && problem.hidden <= 1 << 20, "hidden",
        std::to_string(problem.hidden) + " is not a multiple of 16 up to 1048576");
  check(problem.rank >= 8 && problem.rank % 8 == 0 && problem.rank <= 512, "rank",
        std::to_string(problem.rank) + " is not a multiple of 8 up to 512");
  check(problem.x_stride >= problem.hidden, "x_stride", "tokens overlap");
  check_range(cores, 1, kMaxCores, "cores");
  // for few tokens an adapter's rows are distributed to the cores
  int32_t tile = 64;
  while (tile > 8 && problem.tokens * ((problem.rank + tile - 1) / tile) < cores) tile /= 2;
  const auto rank = field(problem.rank, "rank"), hidden = field(problem.hidden, "hidden");
  LoraShrinkTiling tiling{};
  tiling.params = {field(problem.tokens, "tokens"),
                   hidden,
                   rank,
                   tile < rank ? tile : rank,
                   hidden < kTileHidden ? hidden : kTileHidden,
                   field(problem.x_stride, "x_stride"),
                   problem.scale};
  tiling.cores = cores_for(problem.tokens * ((rank + tile - 1) / tile), cores);
  return tiling;
}

}  // namespace ascend_npu
