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

// One byte each: sign, 4 (5) bits of exponent, 3 (2) of mantissa. E4M3 is the variant without infinities, whose
// largest number is 448.
struct float8_e4m3 {
  uint8_t bits;
};
struct float8_e5m2 {
  uint8_t bits;
};

// Numbers of a KV cache: the dtype of keys and values, or one byte each.
enum class CacheFormat : int32_t { kSame = 0, kInt8 = 1, kFloat8E4m3 = 2, kFloat8E5m2 = 3 };

}  // namespace ascend_vllm
