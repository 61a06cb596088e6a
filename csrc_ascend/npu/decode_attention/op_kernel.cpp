#include "npu/decode_attention/op_kernel.h"

#include "npu/common/launch.h"
#include "npu/decode_attention/params.h"

namespace ascend_npu {

template <class T>
__aicore__ inline void run_decode_attention(GM_ADDR query, GM_ADDR key_cache, GM_ADDR value_cache,
                                            GM_ADDR block_table, GM_ADDR seq_lens, GM_ADDR workspace,
                                            GM_ADDR tiling) {
  AttentionParams params;
  read_params(params, tiling);
  const AttentionInputs<T> inputs{global<T>(query), global<T>(key_cache), global<T>(value_cache),
                                  global<int32_t>(block_table)};
  DecodeAttention<T> kernel(params, inputs, seq_lens, workspace);
  kernel.process();
}

template <class T>
__aicore__ inline void run_merge_parts(GM_ADDR seq_lens, GM_ADDR workspace, GM_ADDR output, GM_ADDR tiling) {
  AttentionParams params;
  read_params(params, tiling);
  MergeParts<T> kernel(params, seq_lens, workspace, output);
  kernel.process();
}

}  // namespace ascend_npu

extern "C" __global__ __aicore__ void decode_attention_f16(GM_ADDR query, GM_ADDR key_cache,
                                                           GM_ADDR value_cache, GM_ADDR block_table,
                                                           GM_ADDR seq_lens, GM_ADDR workspace,
                                                           GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::run_decode_attention<half>(query, key_cache, value_cache, block_table, seq_lens, workspace,
                                         tiling);
}

extern "C" __global__ __aicore__ void decode_attention_bf16(GM_ADDR query, GM_ADDR key_cache,
                                                            GM_ADDR value_cache, GM_ADDR block_table,
                                                            GM_ADDR seq_lens, GM_ADDR workspace,
                                                            GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::run_decode_attention<bfloat16_t>(query, key_cache, value_cache, block_table, seq_lens, workspace,
                                               tiling);
}

extern "C" __global__ __aicore__ void merge_parts_f16(GM_ADDR seq_lens, GM_ADDR workspace, GM_ADDR output,
                                                      GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::run_merge_parts<half>(seq_lens, workspace, output, tiling);
}

extern "C" __global__ __aicore__ void merge_parts_bf16(GM_ADDR seq_lens, GM_ADDR workspace, GM_ADDR output,
                                                       GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::run_merge_parts<bfloat16_t>(seq_lens, workspace, output, tiling);
}

namespace ascend_npu {

void launch_decode_attention(DataType type, uint32_t cores, uint32_t merge_cores, void* stream, uint8_t* query,
                             uint8_t* key_cache, uint8_t* value_cache, uint8_t* block_table, uint8_t* seq_lens,
                             uint8_t* workspace, uint8_t* output, uint8_t* tiling) {
  if (type == DataType::kFloat16) {
    ASCEND_NPU_LAUNCH(decode_attention_f16, cores, stream, query, key_cache, value_cache, block_table, seq_lens,
                      workspace, tiling);
    ASCEND_NPU_LAUNCH(merge_parts_f16, merge_cores, stream, seq_lens, workspace, output, tiling);
  } else {
    ASCEND_NPU_LAUNCH(decode_attention_bf16, cores, stream, query, key_cache, value_cache, block_table,
                      seq_lens, workspace, tiling);
    ASCEND_NPU_LAUNCH(merge_parts_bf16, merge_cores, stream, seq_lens, workspace, output, tiling);
  }
}

}  // namespace ascend_npu
