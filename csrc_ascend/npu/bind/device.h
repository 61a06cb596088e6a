// Helpers of all bindings: from tensors to a kernel's launch on the current stream.
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

// A copy of `bytes` on the device of a tensor. Equal bytes are copied once and cached forever, since captured
// graphs refer to their address.
at::Tensor copy_to_device(const void* bytes, size_t count, const at::Tensor& like);

template <class Params>
at::Tensor place(const Params& params, const at::Tensor& like) {
  return copy_to_device(&params, sizeof(Params), like);
}

inline uint8_t* address(const at::Tensor& tensor) { return static_cast<uint8_t*>(tensor.data_ptr()); }

// Calls `tile` and turns std::invalid_argument into ValueError.
template <class Tile>
auto tiled(Tile tile) {
  try {
    return tile();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// Puts a launch into the task queue of the current stream, which runs it later. `launch` takes the stream and
// owns the tensors that it needs.
template <class Launch>
void enqueue(const char* name, Launch launch) {
  // stream(false) does not drain the queue, which the launch is appended to
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
