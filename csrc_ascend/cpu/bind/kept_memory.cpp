#include "cpu/bind/kept_memory.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <malloc.h>

#include <atomic>
#include <mutex>

namespace ascend_vllm {
namespace {

// Smaller blocks are cached by malloc itself (glibc's largest M_MMAP_THRESHOLD is 32 MiB); larger ones would
// waste memory.
constexpr size_t kLeastBytes = size_t{32} << 20, kMostBytes = size_t{256} << 20;

std::mutex mutex;
c10::Storage* const block = new c10::Storage();  // never freed: torch may be unloaded first

// The block, grown to at least `bytes`; an empty storage if it is in use.
c10::Storage take_block(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (*block && block->use_count() > 1) return {};
  // Orders after the last user's accesses, perhaps in another thread.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!*block || block->nbytes() < bytes) {
    *block = c10::Storage();  // freed first, so that both do not exist at a time
    *block = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte)).storage();
  }
  return *block;
}

}  // namespace

at::Tensor large_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (bytes >= kLeastBytes && bytes <= kMostBytes) {
    if (c10::Storage storage = take_block(bytes)) return at::empty({0}, options).set_(storage, 0, sizes);
  }
  return at::empty(sizes, options);
}

}  // namespace ascend_vllm

// Returns the cached block and malloc's free memory to the system.
extern "C" __attribute__((visibility("default"))) void ascend_vllm_release_memory() {
  {
    const std::lock_guard<std::mutex> lock(ascend_vllm::mutex);
    *ascend_vllm::block = c10::Storage();
  }
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
