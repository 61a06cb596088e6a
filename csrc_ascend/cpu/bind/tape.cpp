#include "cpu/bind/tape.h"

#include <ATen/ops/empty.h>

#include <exception>
#include <string>
#include <unordered_map>

namespace ascend_vllm {

Recording& recording() {
  thread_local Recording current;
  return current;
}

at::Tensor TapePool::take(at::IntArrayRef sizes, const at::TensorOptions& options) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  const int64_t bytes = count * static_cast<int64_t>(options.dtype().itemsize());
  at::Tensor* best = nullptr;
  for (at::Tensor& block : blocks_) {
    // not in use: the pool has the only reference
    if (block.storage().use_count() == 1 && block.numel() >= bytes &&
        (best == nullptr || block.numel() < best->numel())) {
      best = &block;
    }
  }
  if (best == nullptr) {
    blocks_.push_back(at::empty({bytes * growth}, options.dtype(at::kByte)));
    best = &blocks_.back();
  }
  return best->narrow(0, 0, bytes).view(options.dtype().toScalarType()).view(sizes);
}

namespace {

struct Tapes {
  TapePool pool;
  std::unordered_map<int64_t, Tape> tapes;
};

}  // namespace
}  // namespace ascend_vllm

#define ASCEND_VLLM_API extern "C" __attribute__((visibility("default")))

ASCEND_VLLM_API void* ascend_vllm_tapes_make() { return new ascend_vllm::Tapes; }

ASCEND_VLLM_API void ascend_vllm_tapes_free(void* tapes) { delete static_cast<ascend_vllm::Tapes*>(tapes); }

// Starts recording this thread's launches to the tape with this key, replacing an earlier one. growth: see
// TapePool.
ASCEND_VLLM_API void ascend_vllm_tape_begin(void* tapes, int64_t key, int64_t growth) {
  auto* all = static_cast<ascend_vllm::Tapes*>(tapes);
  ascend_vllm::Tape& tape = all->tapes[key];
  tape.calls.clear();
  all->pool.growth = growth;
  ascend_vllm::recording() = {&all->pool, &tape};
}

ASCEND_VLLM_API void ascend_vllm_tape_end() { ascend_vllm::recording() = {}; }

ASCEND_VLLM_API void ascend_vllm_tape_drop(void* tapes, int64_t key) {
  static_cast<ascend_vllm::Tapes*>(tapes)->tapes.erase(key);
}

ASCEND_VLLM_API int64_t ascend_vllm_tape_length(void* tapes, int64_t key) {
  return static_cast<int64_t>(static_cast<ascend_vllm::Tapes*>(tapes)->tapes[key].calls.size());
}

// Returns null, or an error message that is valid until the thread's next call.
ASCEND_VLLM_API const char* ascend_vllm_tape_replay(void* tapes, int64_t key) {
  thread_local std::string text;
  try {
    for (const auto& call : static_cast<ascend_vllm::Tapes*>(tapes)->tapes.at(key).calls) call();
    return nullptr;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}
