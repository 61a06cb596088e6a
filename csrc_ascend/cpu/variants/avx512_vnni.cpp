// One kernel header (named by the build in ASCEND_VLLM_KERNEL_HEADER) compiled for avx512_vnni: avx512 and dot
// products of bytes and of 16-bit integers.
#define ASCEND_VLLM_ISA avx512_vnni
#include "cpu/isa/avx512.h"
#include "cpu/isa/math.h"
#include ASCEND_VLLM_KERNEL_HEADER
