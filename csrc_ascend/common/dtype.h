// Storage types and dtype tags shared by the CPU and NPU kernels; no framework headers.
#pragma once

#include <cstdint>

namespace ascend_vllm {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Two bytes of storage each; arithmetic happens in float32 after a conversion (cpu/isa/convert.h).
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

}  // namespace ascend_vllm
