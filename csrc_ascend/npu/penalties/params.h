// Parameters and launch of penalties; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

struct PenaltiesParams {
  int32_t rows;           // S
  int32_t vocab;          // V
  int32_t logits_stride;  // elements from a row to the next one
  int32_t length;         // L, columns of token_ids
};

// Logits and token ids in the unified buffer at a time.
constexpr int32_t kPenaltiesTile = 4096;
constexpr int32_t kPenaltiesTokens = 2048;

// token_ids: [slots, L] int32, prompt, then output; slots: [S] int64; prompt_lens, seq_lens: [S] int32;
// repetition, frequency, presence: [S] float32; logits: [S, V] float32, in place.
void launch_penalties(uint32_t cores, void* stream, uint8_t* token_ids, uint8_t* slots, uint8_t* prompt_lens,
                      uint8_t* seq_lens, uint8_t* repetition, uint8_t* frequency, uint8_t* presence,
                      uint8_t* logits, uint8_t* tiling);

}  // namespace ascend_npu
