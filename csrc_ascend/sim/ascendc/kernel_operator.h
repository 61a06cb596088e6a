// The host shim of Ascend C: a kernel that includes kernel_operator.h compiles with an ordinary C++ compiler
// and runs on the simulated cores of core.h. Only the functions and overloads that this project's kernels call
// are defined.
#pragma once

#define ASCENDC_HOST_SHIM
#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR std::uint8_t*
// a kernel says that it runs on vector cores alone, of which the shim has no others
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert(KERNEL_TYPE_AIV_ONLY == (type))
enum { KERNEL_TYPE_AIV_ONLY };

#include "repeat.h"
