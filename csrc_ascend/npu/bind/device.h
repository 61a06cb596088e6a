// From tensors to a kernel's launch on the current stream; every binding goes through here.
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "npu/common/types.h"

namespace ascend_npu {

// Vector cores of a tensor's device.
int64_t vector_cores(const at::Tensor& tensor);

// A copy of `bytes` on the tensor's device. The same bytes are copied once and stay for good: a captured graph
// keeps their address, and no launch waits for a copy that an earlier one has made.
at::Tensor place_on_device(const void* bytes, size_t count, const at::Tensor& beside);

template <class Params>
at::Tensor place(const Params& params, const at::Tensor& beside) {
  return place_on_device(&params, sizeof(Params), beside);
}

inline uint8_t* address(const at::Tensor& tensor) { return static_cast<uint8_t*>(tensor.data_ptr()); }

// Raises ValueError where `tile` raises std::invalid_argument.
template <class Tile>
auto tiled(Tile tile) {
  try {
    return tile();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// Puts a launch into the task queue of the current stream. `launch` takes the stream and holds the tensors that
// it needs: the queue runs it later.
template <class Launch>
void enqueue(const char* name, Launch launch) {
  // without emptying the queue: the launch is put behind what is in it
  const aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);
  at_npu::native::OpCommand command;
  command.Name(name);
  command.SetCustomHandler([stream, launch = std::move(launch)]() -> int {
    launch(stream);
    return 0;
  });
  command.Run();
}

// Raises ValueError unless the tensor is contiguous and of this type.
void check_dense(const at::Tensor& tensor, const char* name, at::ScalarType type);

// Raises ValueError unless the tensor is float16 or bfloat16.
DataType data_type(const at::Tensor& tensor, const char* name);

}  // namespace ascend_npu
