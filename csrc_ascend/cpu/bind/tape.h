// Tapes: recorded sequences of kernel calls, replayed without torch and Python.
//
// A binding allocates results and workspaces by new_tensor and ends in launch([=] { … }), whose body has all
// code that reads memory. While a thread records, launch also stores the bodies, and memory comes from a pool,
// where memory of released tensors is reused, in this recording and in later ones. A replay writes to the same
// addresses in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "cpu/bind/kept_memory.h"

namespace ascend_vllm {

// Memory of tapes that are never replayed concurrently.
class TapePool {
 public:
  // New blocks are so many times as large as what they are taken for, for tapes of as many times the rows:
  // without that, tapes of more and more rows would leave a block of each size. What is not written takes no
  // memory.
  int64_t growth = 1;

  at::Tensor take(at::IntArrayRef sizes, const at::TensorOptions& options);

 private:
  std::vector<at::Tensor> blocks_;  // uint8
};

struct Tape {
  std::vector<std::function<void()>> calls;
};

// The recording of a thread; null pointers if there is none.
struct Recording {
  TapePool* pool = nullptr;
  Tape* tape = nullptr;
};
Recording& recording();

// An uninitialised tensor; recorded calls use the tape's memory.
inline at::Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  TapePool* pool = recording().pool;
  return pool == nullptr ? kept_tensor(sizes, options) : pool->take(sizes, options);
}

// Runs `call` now and, if this thread records, in each replay. `call` must not refer to local variables.
template <class Call>
inline void launch(Call&& call) {
  call();
  Tape* tape = recording().tape;
  if (tape != nullptr) tape->calls.emplace_back(std::forward<Call>(call));
}

// For code that cannot be replayed: raises an error while recording.
inline void check_not_recording(const char* what) {
  TORCH_CHECK(recording().tape == nullptr, what, " cannot be recorded");
}

}  // namespace ascend_vllm
