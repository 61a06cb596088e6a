#include "npu/edit_and_sample/op_host.h"

namespace ascend_npu {

EditAndSampleTiling tile_edit_and_sample(int64_t rows, int64_t vocab, int64_t logits_stride, int64_t mask_words,
                                         int64_t nothing, int64_t cores) {
  check_range(rows, 0, 1 << 20, "rows");
  check_range(vocab, 1, kSampleMaxVocab, "vocab");
  check(logits_stride >= vocab, "logits_stride", "rows overlap");
  check(mask_words >= (vocab + 31) / 32, "mask_words", "fewer bits than tokens");
  EditAndSampleTiling tiling{};
  tiling.params = {field(rows, "rows"), field(vocab, "vocab"), field(logits_stride, "logits_stride"),
                   field(mask_words, "mask_words"), field(nothing, "nothing")};
  tiling.cores = cores_for(rows, cores);
  return tiling;
}

}  // namespace ascend_npu
