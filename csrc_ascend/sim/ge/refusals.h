// Stubs of symbols that the wheel links to and that are not simulated: build.py lists them from the wheel's
// libraries. A call of one is an error with its name.
#pragma once

#include <cstdlib>
#include <iostream>

#include "sim/runtime.h"

namespace ascend_sim {

inline int refuse_call(const char* name) {
  set_error(std::string(name) + " is not simulated");
  return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

// A C++ function cannot return an error code, and its caller would continue with garbage.
[[noreturn]] inline void refuse_graph_engine(const char* name) {
  std::cerr << "[ascend-sim] " << name
            << " of the graph engine is not simulated: torchair's GE mode cannot run; "
            << "use npugraph_ex or reduce-overhead" << std::endl;
  std::abort();
}

}  // namespace ascend_sim

// By the name of the symbol alone, since a header may declare the function with its arguments.
#define REFUSE_CALL(name)              \
  int refused_##name() __asm__(#name); \
  int refused_##name() { return ascend_sim::refuse_call(#name); }
#define REFUSE_GRAPH_ENGINE(name)       \
  long refused_##name() __asm__(#name); \
  long refused_##name() { ascend_sim::refuse_graph_engine(#name); }
// A table of virtual functions or a type: its address is taken when a library is loaded.
#define EMPTY_DATA(name) extern "C" void* name[64] = {};
