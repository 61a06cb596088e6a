#include "npu/prefix_attention/op_kernel.h"

#include "npu/common/launch.h"
#include "npu/prefix_attention/params.h"

namespace ascend_npu {

template <class T>
__aicore__ inline void run_prefix_attention(GM_ADDR query, GM_ADDR key_cache, GM_ADDR value_cache,
                                            GM_ADDR block_table, GM_ADDR query_start, GM_ADDR seq_lens,
                                            GM_ADDR output, GM_ADDR tiling) {
  AttentionParams params;
  read_params(params, tiling);
  const AttentionInputs<T> inputs{global<T>(query), global<T>(key_cache), global<T>(value_cache),
                                  global<int32_t>(block_table)};
  PrefixAttention<T> kernel(params, inputs, query_start, seq_lens, output);
  kernel.process();
}

}  // namespace ascend_npu

extern "C" __global__ __aicore__ void prefix_attention_f16(GM_ADDR query, GM_ADDR key_cache,
                                                           GM_ADDR value_cache, GM_ADDR block_table,
                                                           GM_ADDR query_start, GM_ADDR seq_lens,
                                                           GM_ADDR output, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::run_prefix_attention<half>(query, key_cache, value_cache, block_table, query_start, seq_lens,
                                         output, tiling);
}

extern "C" __global__ __aicore__ void prefix_attention_bf16(GM_ADDR query, GM_ADDR key_cache,
                                                            GM_ADDR value_cache, GM_ADDR block_table,
                                                            GM_ADDR query_start, GM_ADDR seq_lens,
                                                            GM_ADDR output, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ascend_npu::run_prefix_attention<bfloat16_t>(query, key_cache, value_cache, block_table, query_start,
                                               seq_lens, output, tiling);
}

namespace ascend_npu {

void launch_prefix_attention(DataType type, uint32_t cores, void* stream, uint8_t* query, uint8_t* key_cache,
                             uint8_t* value_cache, uint8_t* block_table, uint8_t* query_start,
                             uint8_t* seq_lens, uint8_t* output, uint8_t* tiling) {
  if (type == DataType::kFloat16)
    ASCEND_NPU_LAUNCH(prefix_attention_f16, cores, stream, query, key_cache, value_cache, block_table,
                      query_start, seq_lens, output, tiling);
  else
    ASCEND_NPU_LAUNCH(prefix_attention_bf16, cores, stream, query, key_cache, value_cache, block_table,
                      query_start, seq_lens, output, tiling);
}

}  // namespace ascend_npu
