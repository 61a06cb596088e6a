// Tapes: the kernel calls of a piece of code in their order, replayed without torch, or Python, in between.
//
// A binding allocates what it returns, and what it works in, by new_tensor, and ends in launch([=] { … }),
// whose body holds everything that reads memory. While a thread records, launch keeps the bodies. Their memory
// comes from a pool then, where a tensor that nobody holds any more makes room for later ones, in this
// recording and in those after it; a replay writes to the same places in the same order.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <functional>
#include <utility>
#include <vector>

namespace ascend_vllm {

// Memory of tapes that are never replayed at the same time.
class TapePool {
 public:
  at::Tensor take(at::IntArrayRef sizes, const at::TensorOptions& options);

 private:
  std::vector<at::Tensor> blocks_;  // uint8
};

struct Tape {
  std::vector<std::function<void()>> calls;
};

// What a thread is recording, if anything.
struct Recording {
  TapePool* pool = nullptr;
  Tape* tape = nullptr;
};
Recording& recording();

// A tensor without contents.
inline at::Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  TapePool* pool = recording().pool;
  return pool == nullptr ? at::empty(sizes, options) : pool->take(sizes, options);
}

// Does something now, and in each replay of what this thread records. `call` must not refer to locals.
template <class Call>
inline void launch(Call&& call) {
  call();
  Tape* tape = recording().tape;
  if (tape != nullptr) tape->calls.emplace_back(std::forward<Call>(call));
}

// For what is done once, while recording, and not again: there it is an error.
inline void check_not_recording(const char* what) {
  TORCH_CHECK(recording().tape == nullptr, what, " cannot be recorded");
}

}  // namespace ascend_vllm
