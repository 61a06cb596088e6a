#include "npu/edit_and_sample/op_kernel.h"

#include "npu/common/launch.h"
#include "npu/edit_and_sample/params.h"

namespace ascend_npu {

template <class T>
__aicore__ inline void run_edit_and_sample(const SampleAddresses& addresses, GM_ADDR tiling) {
  EditAndSampleParams params;
  read_params(params, tiling);
  EditAndSample<T> kernel(params, addresses);
  kernel.process();
}

}  // namespace ascend_npu

extern "C" __global__ __aicore__ void edit_and_sample_f32(GM_ADDR logits, GM_ADDR counts, GM_ADDR count_rows,
                                                          GM_ADDR fresh_ids, GM_ADDR repetition,
                                                          GM_ADDR frequency, GM_ADDR presence, GM_ADDR bitmask,
                                                          GM_ADDR mask_rows, GM_ADDR temperature, GM_ADDR top_k,
                                                          GM_ADDR top_p, GM_ADDR min_p, GM_ADDR seeds,
                                                          GM_ADDR positions, GM_ADDR ids, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const ascend_npu::SampleAddresses addresses{logits,   counts,  count_rows, fresh_ids,   repetition, frequency,
                                              presence, bitmask, mask_rows,  temperature, top_k,      top_p,
                                              min_p,    seeds,   positions,  ids};
  ascend_npu::run_edit_and_sample<float>(addresses, tiling);
}

extern "C" __global__ __aicore__ void edit_and_sample_f16(GM_ADDR logits, GM_ADDR counts, GM_ADDR count_rows,
                                                          GM_ADDR fresh_ids, GM_ADDR repetition,
                                                          GM_ADDR frequency, GM_ADDR presence, GM_ADDR bitmask,
                                                          GM_ADDR mask_rows, GM_ADDR temperature, GM_ADDR top_k,
                                                          GM_ADDR top_p, GM_ADDR min_p, GM_ADDR seeds,
                                                          GM_ADDR positions, GM_ADDR ids, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const ascend_npu::SampleAddresses addresses{logits,   counts,  count_rows, fresh_ids,   repetition, frequency,
                                              presence, bitmask, mask_rows,  temperature, top_k,      top_p,
                                              min_p,    seeds,   positions,  ids};
  ascend_npu::run_edit_and_sample<half>(addresses, tiling);
}

extern "C" __global__ __aicore__ void edit_and_sample_bf16(
    GM_ADDR logits, GM_ADDR counts, GM_ADDR count_rows, GM_ADDR fresh_ids, GM_ADDR repetition,
    GM_ADDR frequency, GM_ADDR presence, GM_ADDR bitmask, GM_ADDR mask_rows, GM_ADDR temperature, GM_ADDR top_k,
    GM_ADDR top_p, GM_ADDR min_p, GM_ADDR seeds, GM_ADDR positions, GM_ADDR ids, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const ascend_npu::SampleAddresses addresses{logits,   counts,  count_rows, fresh_ids,   repetition, frequency,
                                              presence, bitmask, mask_rows,  temperature, top_k,      top_p,
                                              min_p,    seeds,   positions,  ids};
  ascend_npu::run_edit_and_sample<bfloat16_t>(addresses, tiling);
}

namespace ascend_npu {

void launch_edit_and_sample(LogitType type, uint32_t cores, void* stream, const EditAndSampleTensors& tensors,
                            uint8_t* tiling) {
  const EditAndSampleTensors t = tensors;
  if (type == LogitType::kFloat32)
    ASCEND_NPU_LAUNCH(edit_and_sample_f32, cores, stream, t.logits, t.counts, t.count_rows, t.fresh_ids,
                      t.repetition, t.frequency, t.presence, t.bitmask, t.mask_rows, t.temperature, t.top_k,
                      t.top_p, t.min_p, t.seeds, t.positions, t.ids, tiling);
  else if (type == LogitType::kFloat16)
    ASCEND_NPU_LAUNCH(edit_and_sample_f16, cores, stream, t.logits, t.counts, t.count_rows, t.fresh_ids,
                      t.repetition, t.frequency, t.presence, t.bitmask, t.mask_rows, t.temperature, t.top_k,
                      t.top_p, t.min_p, t.seeds, t.positions, t.ids, tiling);
  else
    ASCEND_NPU_LAUNCH(edit_and_sample_bf16, cores, stream, t.logits, t.counts, t.count_rows, t.fresh_ids,
                      t.repetition, t.frequency, t.presence, t.bitmask, t.mask_rows, t.temperature, t.top_k,
                      t.top_p, t.min_p, t.seeds, t.positions, t.ids, tiling);
}

}  // namespace ascend_npu
