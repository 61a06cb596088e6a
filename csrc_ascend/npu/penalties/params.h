// Parameters of penalties; host and device.
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

}  // namespace ascend_npu
