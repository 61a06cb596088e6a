// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for neon_bf16: neon and dot
// products of bytes and of bfloat16 pairs.
#define ASCEND_VLLM_ISA neon_bf16
#include "cpu/isa/neon.h"
// after the former
#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
