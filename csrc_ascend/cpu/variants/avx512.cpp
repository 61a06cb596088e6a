// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for avx512.
#define ASCEND_VLLM_ISA avx512
#include "cpu/isa/avx512.h"

#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
