// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for neon.
#define ASCEND_VLLM_ISA neon
#include "cpu/isa/neon.h"

#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
