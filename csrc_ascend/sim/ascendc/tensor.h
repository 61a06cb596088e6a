// Tensors of a kernel: views of the unified buffer and of global memory.
#pragma once

#include <type_traits>

#include "core.h"
#include "types.h"

namespace AscendC {

using ascend_sim::ascendc::core;
using ascend_sim::ascendc::require;
using ascend_sim::ascendc::violate;

// Elements of the unified buffer. GetValue and SetValue are the scalar unit's and slow on the chip.
template <class T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;
  LocalTensor(T* data, std::uint32_t size) : data_(data), size_(size) {}

  LocalTensor operator[](std::uint32_t offset) const {
    if (offset > size_)
      violate("LocalTensor[]",
              "offset " + std::to_string(offset) + " of a tensor of " + std::to_string(size_) + " elements");
    return {data_ + offset, size_ - offset};
  }

  T GetValue(std::uint32_t index) const {
    if (index >= size_) violate("LocalTensor.GetValue", "index beyond the tensor");
    core().execute(PIPE_S, "LocalTensor.GetValue", {{data_ + index, sizeof(T), false}});
    return data_[index];
  }

  void SetValue(std::uint32_t index, T value) const {
    if (index >= size_) violate("LocalTensor.SetValue", "index beyond the tensor");
    core().execute(PIPE_S, "LocalTensor.SetValue", {{data_ + index, sizeof(T), true}});
    data_[index] = value;
  }

  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    return {reinterpret_cast<U*>(data_), static_cast<std::uint32_t>(size_ * sizeof(T) / sizeof(U))};
  }

  std::uint32_t GetSize() const { return size_; }
  // For the shim's own calls: where the elements are.
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  std::uint32_t size_ = 0;
};

// Elements of global memory.
template <class T>
class GlobalTensor {
 public:
  using PrimType = T;

  void SetGlobalBuffer(T* data) { data_ = data; }
  void SetGlobalBuffer(T* data, std::uint64_t size) {
    data_ = data;
    size_ = size;
  }

  GlobalTensor operator[](std::uint64_t offset) const {
    if (offset > size_)
      violate("GlobalTensor[]",
              "offset " + std::to_string(offset) + " of a tensor of " + std::to_string(size_) + " elements");
    GlobalTensor tensor;
    tensor.SetGlobalBuffer(data_ + offset, size_ - offset);
    return tensor;
  }

  T GetValue(std::uint64_t index) const {
    if (index >= size_) violate("GlobalTensor.GetValue", "index beyond the tensor");
    core().execute(PIPE_S, "GlobalTensor.GetValue", {{data_ + index, sizeof(T), false}});
    return data_[index];
  }

  void SetValue(std::uint64_t index, T value) const {
    require(index < size_, "GlobalTensor.SetValue", "index beyond the tensor");
    core().execute(PIPE_S, "GlobalTensor.SetValue", {{data_ + index, sizeof(T), true}});
    data_[index] = value;
  }

  std::uint64_t GetSize() const { return size_; }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  // without a size only the launch's own bounds hold
  std::uint64_t size_ = std::numeric_limits<std::uint64_t>::max() / 2;
};

}  // namespace AscendC
