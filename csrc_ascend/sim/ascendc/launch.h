// Runs a kernel on simulated cores, one after another.
#pragma once

#include <functional>
#include <memory>

#include "kernel_operator.h"

namespace ascend_sim::ascendc {

// Calls `kernel` once for each of `count` cores, with the global memory registered in `memory`.
// Raises Violation with the core's number.
inline void launch(int count, GlobalMemory& memory, const std::function<void()>& kernel) {
  require(count > 0 && count <= 65535, "launch", std::to_string(count) + " cores");
  memory.begin_launch();
  for (int index = 0; index < count; ++index) {
    const auto core = std::make_unique<Core>(index, count, memory);
    current_core = core.get();
    try {
      kernel();
      core->finish();
    } catch (const Violation& violation) {
      current_core = nullptr;
      throw Violation("core " + std::to_string(index) + ": " + violation.what());
    }
    current_core = nullptr;
  }
}

}  // namespace ascend_sim::ascendc
