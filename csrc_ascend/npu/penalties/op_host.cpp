#include "npu/penalties/op_host.h"

namespace ascend_npu {

PenaltiesTiling tile_penalties(int64_t rows, int64_t vocab, int64_t logits_stride, int64_t length,
                               int64_t cores) {
  check_range(rows, 0, 1 << 20, "rows");
  check_range(vocab, 1, 1 << 24, "vocab");
  check_range(length, 0, 1 << 24, "length");
  check(logits_stride >= vocab, "logits_stride", "rows overlap");
  PenaltiesTiling tiling{};
  tiling.params = {field(rows, "rows"), field(vocab, "vocab"), field(logits_stride, "logits_stride"),
                   field(length, "length")};
  tiling.cores = cores_for(rows * ((vocab + kPenaltiesTile - 1) / kPenaltiesTile), cores);
  return tiling;
}

}  // namespace ascend_npu
