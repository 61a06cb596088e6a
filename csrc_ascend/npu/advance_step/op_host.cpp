#include "npu/advance_step/op_host.h"

namespace ascend_npu {

AdvanceStepTiling tile_advance_step(int64_t rows, int64_t block_size, int64_t max_blocks, int64_t cores) {
  check_range(rows, 0, 1 << 24, "rows");
  check_range(block_size, 1, 1 << 20, "block_size");
  check_range(max_blocks, 1, 1 << 24, "max_blocks");
  // a core's time is that of its scalar unit, so rows spread; 32 of them are the least that a copy is worth
  int64_t tile = (rows + cores - 1) / cores;
  tile = tile < 32 ? 32 : tile > 512 ? 512 : (tile + 31) / 32 * 32;
  AdvanceStepTiling tiling{};
  tiling.params = {field(rows, "rows"), field(tile, "rows"), field(block_size, "block_size"),
                   field(max_blocks, "max_blocks")};
  tiling.cores = cores_for((rows + tile - 1) / tile, cores);
  return tiling;
}

}  // namespace ascend_npu
