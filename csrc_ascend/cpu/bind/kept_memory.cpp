#include "cpu/bind/kept_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <malloc.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace ascend_vllm {
namespace {

// Smaller ones are malloc's.
constexpr size_t kLeastBytes = size_t{1} << 20;
// Of all blocks; what is above is freed with its tensor.
constexpr size_t kMostBytes = size_t{256} << 20;
// A tensor takes a block of up to so many times its size.
constexpr size_t kMostWaste = 4;

class KeptBlocks {
 public:
  // A block of at least `bytes` that nothing else uses.
  c10::Storage take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // `best`: the smallest that is large enough; `grown`: the largest that is not
    c10::Storage *best = nullptr, *grown = nullptr;
    size_t kept = 0;
    for (c10::Storage& block : blocks_) {
      kept += block.nbytes();
      if (block.use_count() > 1) continue;
      if (block.nbytes() < bytes) {
        if (grown == nullptr || block.nbytes() > grown->nbytes()) grown = &block;
      } else if (block.nbytes() <= kMostWaste * bytes && (best == nullptr || block.nbytes() < best->nbytes())) {
        best = &block;
      }
    }
    // Orders after the last user's accesses, perhaps in another thread.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (best != nullptr) return *best;
    if (grown != nullptr) kept -= grown->nbytes();
    if (kept + bytes > kMostBytes) return new_block(bytes);
    if (grown == nullptr) grown = &blocks_.emplace_back();
    *grown = c10::Storage();  // freed first, so that both do not exist at a time
    *grown = new_block(bytes);
    return *grown;
  }

  // Frees the blocks that nothing uses.
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(blocks_, [](const c10::Storage& block) { return block.use_count() == 1; });
  }

 private:
  static c10::Storage new_block(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "There is no memory for a result of ", bytes,
                     " bytes");
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);  // fails where the system has none
#endif
    return at::from_blob(
               memory, {static_cast<int64_t>(bytes)}, [bytes](void* p) { munmap(p, bytes); }, at::kByte)
        .storage();
  }

  std::mutex mutex_;
  std::vector<c10::Storage> blocks_;
};

KeptBlocks& blocks() {
  static auto* const all = new KeptBlocks;  // never freed: torch may be unloaded first
  return *all;
}

}  // namespace

at::Tensor kept_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (bytes < kLeastBytes) return at::empty(sizes, options);
  return at::empty({0}, options).set_(blocks().take(bytes), 0, sizes);
}

}  // namespace ascend_vllm

// Returns the cached blocks and malloc's free memory to the system.
extern "C" __attribute__((visibility("default"))) void ascend_vllm_release_memory() {
  ascend_vllm::blocks().release();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
