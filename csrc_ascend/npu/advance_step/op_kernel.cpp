#include "npu/advance_step/op_kernel.h"

#include "npu/advance_step/params.h"
#include "npu/common/launch.h"

extern "C" __global__ __aicore__ void advance_step(GM_ADDR sampled, GM_ADDR block_table, GM_ADDR stopped,
                                                   GM_ADDR input_ids, GM_ADDR positions, GM_ADDR seq_lens,
                                                   GM_ADDR slot_mapping, GM_ADDR tiling) {
  using namespace ascend_npu;
  AdvanceStepParams params;
  read_params(params, tiling);
  const AdvanceStepTensors tensors{global<int64_t>(sampled),   global<int64_t>(input_ids),
                                   global<int64_t>(positions), global<int64_t>(slot_mapping),
                                   global<int32_t>(seq_lens),  global<int32_t>(block_table),
                                   global<uint8_t>(stopped)};
  AdvanceStep kernel(params, tensors);
  kernel.process();
}

namespace ascend_npu {

void launch_advance_step(uint32_t cores, void* stream, uint8_t* sampled, uint8_t* block_table, uint8_t* stopped,
                         uint8_t* input_ids, uint8_t* positions, uint8_t* seq_lens, uint8_t* slot_mapping,
                         uint8_t* tiling) {
  ASCEND_NPU_LAUNCH(advance_step, cores, stream, sampled, block_table, stopped, input_ids, positions, seq_lens,
                    slot_mapping, tiling);
}

}  // namespace ascend_npu
