#include "npu/penalties/op_kernel.h"

#include "npu/common/launch.h"
#include "npu/penalties/params.h"

extern "C" __global__ __aicore__ void penalties(GM_ADDR token_ids, GM_ADDR slots, GM_ADDR prompt_lens,
                                                GM_ADDR seq_lens, GM_ADDR repetition, GM_ADDR frequency,
                                                GM_ADDR presence, GM_ADDR logits, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  using namespace ascend_npu;
  PenaltiesParams params;
  read_params(params, tiling);
  const PenaltiesTensors tensors{global<float>(logits),      global<float>(repetition),
                                 global<float>(frequency),   global<float>(presence),
                                 global<int32_t>(token_ids), global<int32_t>(prompt_lens),
                                 global<int32_t>(seq_lens),  global<int64_t>(slots)};
  Penalties kernel(params, tensors);
  kernel.process();
}

namespace ascend_npu {

void launch_penalties(uint32_t cores, void* stream, uint8_t* token_ids, uint8_t* slots, uint8_t* prompt_lens,
                      uint8_t* seq_lens, uint8_t* repetition, uint8_t* frequency, uint8_t* presence,
                      uint8_t* logits, uint8_t* tiling) {
  ASCEND_NPU_LAUNCH(penalties, cores, stream, token_ids, slots, prompt_lens, seq_lens, repetition, frequency,
                    presence, logits, tiling);
}

}  // namespace ascend_npu
