// The custom operators' kernels on the simulated runtime: a launch goes to a stream of libascendcl, which runs
// it or records it into a graph, and works on device memory. One translation unit, so that it compiles once.
#if defined(__x86_64__)
// float16 to float and back in one instruction each; the kernels spend most of their time there
#pragma GCC target("f16c")
#endif

#include <functional>
#include <string>
#include <utility>

#include "kernel_operator.h"
#include "sim/ascendc/launch.h"
#include "sim/runtime.h"

namespace {

// `kernel` owns its arguments: a recorded launch runs later, and more than once.
void launch_on_stream(const std::string& name, int cores, void* stream, std::function<void()> kernel) {
  using ascend_sim::ascendc::GlobalMemory;
  if (ascend_sim::tracing())
    ascend_sim::trace("{\"op\": \"" + name + "\", \"args\": {\"cores\": " + std::to_string(cores) + "}}");
  ascend_sim::submit(stream, name, [cores, kernel = std::move(kernel)] {
    GlobalMemory memory(ascend_sim::on_device);
    ascend_sim::ascendc::launch(cores, memory, kernel);
  });
}

}  // namespace

#define ASCEND_NPU_LAUNCH(kernel, cores, stream, ...) \
  launch_on_stream(#kernel, static_cast<int>(cores), stream, [=] { kernel(__VA_ARGS__); })

#include "npu/edit_and_sample/op_kernel.cpp"
#include "npu/lora_expand/op_kernel.cpp"
#include "npu/lora_shrink/op_kernel.cpp"
#include "npu/norm_rope_store/op_kernel.cpp"
#include "npu/store_kv/op_kernel.cpp"
