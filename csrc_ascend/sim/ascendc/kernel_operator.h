// The host shim of Ascend C: a kernel that includes kernel_operator.h compiles with an ordinary C++ compiler
// and runs on the simulated cores of core.h. Only what this project's kernels call is here, in the forms that
// they call it.
#pragma once

#define ASCENDC_HOST_SHIM
#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR std::uint8_t*

#include "repeat.h"
