// Parameters and launch of advance_step; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

struct AdvanceStepParams {
  int32_t rows;
  int32_t tile_rows;  // rows in the unified buffer at a time
  int32_t block_size;
  int32_t max_blocks;  // columns of the block table
};

// sampled: [R] int64; block_table: [R, B] int32; stopped: [R] bool. In place: input_ids [R] int64 becomes what
// was sampled, positions [R] int64 and seq_lens [R] int32 one more, slot_mapping [R] int64 where the new
// position lies. A row that stopped, or whose next position is beyond its blocks, stays as it is, with slot -1.
void launch_advance_step(uint32_t cores, void* stream, uint8_t* sampled, uint8_t* block_table, uint8_t* stopped,
                         uint8_t* input_ids, uint8_t* positions, uint8_t* seq_lens, uint8_t* slot_mapping,
                         uint8_t* tiling);

}  // namespace ascend_npu
