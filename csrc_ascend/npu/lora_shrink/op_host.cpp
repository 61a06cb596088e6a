#include "npu/lora_shrink/op_host.h"

namespace ascend_npu {
namespace {

// of products in float32, for each of a run's tokens, 64 KiB
constexpr int32_t kTileHidden = 1024, kTileRanks = 8;

}  // namespace

LoraShrinkTiling tile_lora_shrink(const LoraShrinkProblem& problem, int64_t cores) {
  check_range(problem.tokens, 0, 1 << 24, "tokens");
  check(problem.hidden >= 16 && problem.hidden % 16 == 0 && problem.hidden <= 1 << 20, "hidden",
        std::to_string(problem.hidden) + " is not a multiple of 16 up to 1048576");
  check(problem.rank >= 8 && problem.rank % 8 == 0 && problem.rank <= 512, "rank",
        std::to_string(problem.rank) + " is not a multiple of 8 up to 512");
  check(problem.x_stride >= problem.hidden, "x_stride", "tokens overlap");
  check_range(cores, 1, kMaxCores, "cores");
  // for few tokens first the tokens are distributed to more cores, each of which reads the adapters of its own;
  // then an adapter's rows, each part of which reads x
  int32_t tokens = kRunTokens, tile = kTileRanks;
  const auto items = [&] { return (problem.tokens + tokens - 1) / tokens * (problem.rank / tile); };
  while (tokens > 8 && items() < cores) tokens /= 2;
  while (tile > 2 && items() < cores / 2) tile /= 2;
  const auto rank = field(problem.rank, "rank"), hidden = field(problem.hidden, "hidden");
  LoraShrinkTiling tiling{};
  tiling.params = {field(problem.tokens, "tokens"),
                   hidden,
                   rank,
                   tokens,
                   tile,
                   hidden < kTileHidden ? hidden : kTileHidden,
                   field(problem.x_stride, "x_stride"),
                   problem.scale};
  tiling.cores = cores_for(items(), cores);
  return tiling;
}

}  // namespace ascend_npu
