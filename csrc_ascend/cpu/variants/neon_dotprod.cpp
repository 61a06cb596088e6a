// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for neon_dotprod: neon and dot
// products of bytes.
#define ASCEND_VLLM_ISA neon_dotprod
#include "cpu/isa/neon.h"
// after the former
#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
