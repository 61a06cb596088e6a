// Runs the kernels of csrc_ascend/npu on simulated cores; one translation unit, so that it compiles once.
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "npu/common/launch.h"
#include "npu/edit_and_sample/op_host.cpp"
#include "npu/edit_and_sample/op_kernel.cpp"
#include "npu/lora_expand/op_host.cpp"
#include "npu/lora_expand/op_kernel.cpp"
#include "npu/lora_shrink/op_host.cpp"
#include "npu/lora_shrink/op_kernel.cpp"
#include "npu/norm_rope_store/op_host.cpp"
#include "npu/norm_rope_store/op_kernel.cpp"
#include "npu/store_kv/op_host.cpp"
#include "npu/store_kv/op_kernel.cpp"

namespace {

using namespace ascend_npu;
using ascend_sim::ascendc::GlobalMemory;

// A tensor as the test hands it over.
struct Buffer {
  std::uint8_t* data;
  std::int64_t bytes;
  std::int64_t writable;
};

// The arguments of a call: tensors, whole numbers in the order that the op's host code lists them, and floats.
struct Call {
  const Buffer* buffers;
  const std::int64_t* numbers;
  const double* reals;
  std::int64_t cores;
  GlobalMemory memory;

  std::uint8_t* data(int index) const { return buffers[index].data; }

  // Parameters in global memory, which kernels read only.
  template <class Params>
  std::uint8_t* place(Params& params) {
    auto* address = reinterpret_cast<std::uint8_t*>(&params);
    memory.add(address, sizeof(Params), false);
    return address;
  }
};

void run_store_kv(Call& call) {
  const auto* n = call.numbers;
  auto tiled = tile_store_kv({n[0], n[1], n[2], n[3], n[4], n[5], KvLayout(n[6])}, call.cores);
  launch_store_kv(tiled.cores, &call.memory, call.data(0), call.data(1), call.data(2), call.data(3),
                  call.data(4), call.place(tiled.params));
}

void run_lora_shrink_op(Call& call) {
  const auto* n = call.numbers;
  auto tiled = tile_lora_shrink({n[1], n[2], n[3], n[4], static_cast<float>(call.reals[0])}, call.cores);
  launch_lora_shrink(DataType(n[0]), tiled.cores, &call.memory, call.data(0), call.data(1), call.data(2),
                     call.data(3), call.data(4), call.place(tiled.params));
}

void run_lora_expand_op(Call& call) {
  const auto* n = call.numbers;
  auto tiled = tile_lora_expand({n[1], n[2], n[3], n[4], n[5]}, call.cores);
  launch_lora_expand(DataType(n[0]), tiled.cores, &call.memory, call.data(0), call.data(1), call.data(2),
                     call.data(3), call.data(4), call.place(tiled.params));
}

void run_edit_and_sample_op(Call& call) {
  const auto* n = call.numbers;
  auto tiled = tile_edit_and_sample(n[1], n[2], n[3], n[4], n[5], call.cores);
  // counts and ids are written, so that the test passes them last
  const EditAndSampleTensors tensors{call.data(0),  call.data(14), call.data(1),  call.data(2),
                                     call.data(3),  call.data(4),  call.data(5),  call.data(6),
                                     call.data(7),  call.data(8),  call.data(9),  call.data(10),
                                     call.data(11), call.data(12), call.data(13), call.data(15)};
  launch_edit_and_sample(LogitType(n[0]), tiled.cores, &call.memory, tensors, call.place(tiled.params));
}

void run_norm_rope_store_op(Call& call) {
  const auto* n = call.numbers;
  const auto number = [n](int index) { return static_cast<std::int32_t>(n[index]); };
  auto tiled =
      tile_norm_rope_store({number(1), number(2), number(3), number(4), number(5), number(6), number(7),
                            number(8), number(9), number(10), static_cast<float>(call.reals[0])},
                           call.cores);
  const NormRopeStoreTensors tensors{call.data(0),  call.data(1),  call.data(2), call.data(3), call.data(4),
                                     call.data(5),  call.data(6),  call.data(7), call.data(8), call.data(9),
                                     call.data(10), call.data(11), call.data(12)};
  launch_norm_rope_store(DataType(n[0]), tiled.cores, &call.memory, tensors, call.place(tiled.params));
}

const std::map<std::string, std::function<void(Call&)>> kRunners = {
    {"norm_rope_store", run_norm_rope_store_op},
    {"edit_and_sample", run_edit_and_sample_op},
    {"lora_shrink", run_lora_shrink_op},
    {"lora_expand", run_lora_expand_op},
    {"store_kv", run_store_kv},
};

}  // namespace

// Runs a kernel; returns what the host code or the shim objects to, else an empty string. `work`: what it did.
extern "C" const char* run_kernel(const char* name, const Buffer* buffers, int num_buffers,
                                  const std::int64_t* numbers, const double* reals, std::int64_t cores,
                                  ascend_sim::ascendc::Work* work) {
  static std::string message;
  message.clear();
  Call call{buffers, numbers, reals, cores, {}};
  for (int index = 0; index < num_buffers; ++index)
    if (buffers[index].bytes > 0)
      call.memory.add(buffers[index].data, buffers[index].bytes, buffers[index].writable);
  try {
    kRunners.at(name)(call);
  } catch (const std::exception& error) {
    message = error.what();
  }
  *work = call.memory.work;
  return message.c_str();
}
