# The directories of this one that each hold an operator: op_kernel.cpp for the chip, op_host.cpp for the host.
set(ASCEND_VLLM_NPU_OPS
    edit_and_sample
    lora_expand
    lora_shrink
    norm_rope_store
    store_kv)
