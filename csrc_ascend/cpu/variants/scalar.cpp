// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for scalar.
#define ASCEND_VLLM_ISA scalar
#include "cpu/isa/scalar.h"

#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
