// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for avx512_bf16.
#define ASCEND_VLLM_ISA avx512_bf16
#include "cpu/isa/avx512_bf16.h"

#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
