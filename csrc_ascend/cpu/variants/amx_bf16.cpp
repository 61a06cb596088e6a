// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for amx_bf16: avx512_bf16 and
// tiles.
#define ASCEND_VLLM_ISA amx_bf16
#include "cpu/isa/avx512_bf16.h"
#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
