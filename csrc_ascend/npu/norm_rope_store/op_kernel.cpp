#include "npu/norm_rope_store/op_kernel.h"

#include "npu/common/launch.h"
#include "npu/norm_rope_store/params.h"

namespace ascend_npu {

template <class T>
__aicore__ inline void run_norm_rope_store(const NormRopeStoreAddresses& addresses, GM_ADDR tiling) {
  NormRopeStoreParams params;
  read_params(params, tiling);
  NormRopeStore<T> kernel(params, addresses);
  kernel.process();
}

}  // namespace ascend_npu

extern "C" __global__ __aicore__ void norm_rope_store_f16(GM_ADDR query, GM_ADDR key, GM_ADDR value,
                                                          GM_ADDR query_weight, GM_ADDR key_weight,
                                                          GM_ADDR positions, GM_ADDR cos_sin, GM_ADDR slots,
                                                          GM_ADDR query_out, GM_ADDR key_cache,
                                                          GM_ADDR value_cache, GM_ADDR kept_keys,
                                                          GM_ADDR kept_values, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const ascend_npu::NormRopeStoreAddresses addresses{
      query, key,       value,     query_weight, key_weight, positions,  cos_sin,
      slots, query_out, key_cache, value_cache,  kept_keys,  kept_values};
  ascend_npu::run_norm_rope_store<half>(addresses, tiling);
}

extern "C" __global__ __aicore__ void norm_rope_store_bf16(GM_ADDR query, GM_ADDR key, GM_ADDR value,
                                                           GM_ADDR query_weight, GM_ADDR key_weight,
                                                           GM_ADDR positions, GM_ADDR cos_sin, GM_ADDR slots,
                                                           GM_ADDR query_out, GM_ADDR key_cache,
                                                           GM_ADDR value_cache, GM_ADDR kept_keys,
                                                           GM_ADDR kept_values, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const ascend_npu::NormRopeStoreAddresses addresses{
      query, key,       value,     query_weight, key_weight, positions,  cos_sin,
      slots, query_out, key_cache, value_cache,  kept_keys,  kept_values};
  ascend_npu::run_norm_rope_store<bfloat16_t>(addresses, tiling);
}

namespace ascend_npu {

void launch_norm_rope_store(DataType type, uint32_t cores, void* stream, const NormRopeStoreTensors& tensors,
                            uint8_t* tiling) {
  const NormRopeStoreTensors t = tensors;
  if (type == DataType::kFloat16)
    ASCEND_NPU_LAUNCH(norm_rope_store_f16, cores, stream, t.query, t.key, t.value, t.query_weight, t.key_weight,
                      t.positions, t.cos_sin, t.slots, t.query_out, t.key_cache, t.value_cache, t.kept_keys,
                      t.kept_values, tiling);
  else
    ASCEND_NPU_LAUNCH(norm_rope_store_bf16, cores, stream, t.query, t.key, t.value, t.query_weight,
                      t.key_weight, t.positions, t.cos_sin, t.slots, t.query_out, t.key_cache, t.value_cache,
                      t.kept_keys, t.kept_values, tiling);
}

}  // namespace ascend_npu
