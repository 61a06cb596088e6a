// Tiling and launch of penalties.
#pragma once

#include "npu/common/host.h"
#include "npu/penalties/params.h"

namespace ascend_npu {

struct PenaltiesTiling {
  PenaltiesParams params;
  uint32_t cores;
};

// Raises std::invalid_argument that names the argument.
PenaltiesTiling tile_penalties(int64_t rows, int64_t vocab, int64_t logits_stride, int64_t length,
                               int64_t cores);

// token_ids: [slots, L] int32, prompt, then output; slots: [S] int64; prompt_lens, seq_lens: [S] int32;
// repetition, frequency, presence: [S] float32; logits: [S, V] float32, in place.
void launch_penalties(uint32_t cores, void* stream, uint8_t* token_ids, uint8_t* slots, uint8_t* prompt_lens,
                      uint8_t* seq_lens, uint8_t* repetition, uint8_t* frequency, uint8_t* presence,
                      uint8_t* logits, uint8_t* tiling);

}  // namespace ascend_npu
