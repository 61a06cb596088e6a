#include "npu/store_kv/op_kernel.h"

#include "npu/common/launch.h"
#include "npu/store_kv/params.h"

extern "C" __global__ __aicore__ void store_kv(GM_ADDR key, GM_ADDR value, GM_ADDR slots, GM_ADDR key_cache,
                                               GM_ADDR value_cache, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::StoreKvParams params;
  ascend_npu::read_params(params, tiling);
  ascend_npu::StoreKv kernel(params, slots);
  kernel.process(key, params.key_stride, key_cache);
  kernel.process(value, params.value_stride, value_cache);
}

namespace ascend_npu {

void launch_store_kv(uint32_t cores, void* stream, uint8_t* key, uint8_t* value, uint8_t* slots,
                     uint8_t* key_cache, uint8_t* value_cache, uint8_t* tiling) {
  ASCEND_NPU_LAUNCH(store_kv, cores, stream, key, value, slots, key_cache, value_cache, tiling);
}

}  // namespace ascend_npu
