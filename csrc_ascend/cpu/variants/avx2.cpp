// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for avx2.
#define ASCEND_VLLM_ISA avx2
#include "cpu/isa/avx2.h"

#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
