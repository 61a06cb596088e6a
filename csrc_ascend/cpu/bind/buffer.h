// Memory that bindings keep for the workspaces of kernels.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace ascend_vllm {

// Reusable memory that only grows.
class Buffer {
 public:
  float* floats(int64_t count) {
    if (count > size_) {
      memory_.reset(new (std::align_val_t{64}) float[count]);
      size_ = count;
    }
    return memory_.get();
  }

 private:
  struct Delete {
    void operator()(float* p) const { operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Delete> memory_;
  int64_t size_ = 0;
};

}  // namespace ascend_vllm
