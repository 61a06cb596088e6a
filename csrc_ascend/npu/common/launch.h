// Launches a kernel; only this file has the toolchain's launch syntax. With the host shim the "stream" is the
// simulated global memory, and the launch is synchronous; for other streams define the macro before including
// this file.
#pragma once

#include "kernel_operator.h"

#ifndef ASCEND_NPU_LAUNCH
#ifdef ASCENDC_HOST_SHIM
#include "sim/ascendc/launch.h"
#define ASCEND_NPU_LAUNCH(kernel, cores, stream, ...)                                   \
  ascend_sim::ascendc::launch(static_cast<int>(cores),                                  \
                              *static_cast<ascend_sim::ascendc::GlobalMemory*>(stream), \
                              [&] { kernel(__VA_ARGS__); })
#else
#define ASCEND_NPU_LAUNCH(kernel, cores, stream, ...) kernel<<<cores, nullptr, stream>>>(__VA_ARGS__)
#endif
#endif
