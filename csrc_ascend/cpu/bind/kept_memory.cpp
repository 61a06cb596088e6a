#include "cpu/bind/kept_memory.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <malloc.h>

#include <atomic>
#include <mutex>

namespace ascend_vllm {
namespace {

// Below, malloc keeps memory itself (glibc's largest M_MMAP_THRESHOLD is 32 MiB); above, it is not worth
// keeping.
constexpr size_t kLeastBytes = size_t{32} << 20, kMostBytes = size_t{256} << 20;

std::mutex mutex;
c10::Storage* const block = new c10::Storage();  // never freed: torch may end before

// The block, if it has room for `bytes` or can get it; an empty storage if somebody holds it.
c10::Storage take_block(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (*block && block->use_count() > 1) return {};
  // What the last holder did with it, perhaps in another thread, is done.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!*block || block->nbytes() < bytes) {
    *block = c10::Storage();  // first, or both would be there for a moment
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

// Gives the system back what is kept, and what malloc keeps of freed tensors.
extern "C" __attribute__((visibility("default"))) void ascend_vllm_release_memory() {
  {
    const std::lock_guard<std::mutex> lock(ascend_vllm::mutex);
    *ascend_vllm::block = c10::Storage();
  }
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
