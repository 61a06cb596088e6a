// Parameters and launch of edit_and_sample; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

// Of logits.
enum class LogitType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct EditAndSampleParams {
  int32_t rows;           // S
  int32_t vocab;          // V
  int32_t logits_stride;  // elements from a row to the next one
  int32_t mask_words;     // of a row of the bitmask
  int32_t nothing;        // the id of a row whose tokens are all forbidden
};

// Logits in the unified buffer at a time; they are reduced in blocks.
constexpr int32_t kSampleTile = 4096;
constexpr int32_t kSampleBlock = 64;
constexpr int32_t kSampleMaxVocab = kSampleTile * 64;
// Logits that a search keeps in the unified buffer, and the room for them: a tile may add as many as it has.
constexpr int32_t kSampleRoom = 3072 + kSampleTile;

// Addresses of tensors on the device; see the op's reference for shapes and meaning.
struct EditAndSampleTensors {
  uint8_t *logits, *counts, *count_rows, *fresh_ids, *repetition, *frequency, *presence, *bitmask, *mask_rows,
      *temperature, *top_k, *top_p, *min_p, *seeds, *positions, *ids;
};

void launch_edit_and_sample(LogitType type, uint32_t cores, void* stream, const EditAndSampleTensors& tensors,
                            uint8_t* tiling);

}  // namespace ascend_npu
