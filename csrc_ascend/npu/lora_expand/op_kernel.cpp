#include "npu/lora_expand/op_kernel.h"

#include "npu/common/launch.h"
#include "npu/lora_expand/params.h"

namespace ascend_npu {

template <class T>
__aicore__ inline void run_lora_expand(GM_ADDR x, GM_ADDR weights, GM_ADDR adapters, GM_ADDR order, GM_ADDR y,
                                       GM_ADDR tiling) {
  LoraExpandParams params;
  read_params(params, tiling);
  LoraExpand<T> kernel(params, x, weights, adapters, order, y);
  kernel.process();
}

}  // namespace ascend_npu

extern "C" __global__ __aicore__ void lora_expand_f16(GM_ADDR x, GM_ADDR weights, GM_ADDR adapters,
                                                      GM_ADDR order, GM_ADDR y, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::run_lora_expand<half>(x, weights, adapters, order, y, tiling);
}

extern "C" __global__ __aicore__ void lora_expand_bf16(GM_ADDR x, GM_ADDR weights, GM_ADDR adapters,
                                                       GM_ADDR order, GM_ADDR y, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::run_lora_expand<bfloat16_t>(x, weights, adapters, order, y, tiling);
}

namespace ascend_npu {

void launch_lora_expand(DataType type, uint32_t cores, void* stream, uint8_t* x, uint8_t* weights,
                        uint8_t* adapters, uint8_t* order, uint8_t* y, uint8_t* tiling) {
  if (type == DataType::kFloat16)
    ASCEND_NPU_LAUNCH(lora_expand_f16, cores, stream, x, weights, adapters, order, y, tiling);
  else
    ASCEND_NPU_LAUNCH(lora_expand_bf16, cores, stream, x, weights, adapters, order, y, tiling);
}

}  // namespace ascend_npu
