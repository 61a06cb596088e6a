// Layouts of a layer's paged cache as strides, so that one kernel serves every layout.
//
// P blocks, S tokens of a block, K heads, D head size. A head's D elements are one or more contiguous segments.
#pragma once

#include <cstdint>

#include "npu/common/host.h"
#include "npu/common/kv_strides.h"

namespace ascend_npu {

enum class KvLayout : int32_t {
  kBlockTokenHead = 0,  // [P, S, K, D], what CANN's fused attention reads as [P, S, K * D]
  kBlockHeadToken = 1,  // [P, K, S, D]
  kFractalNz = 2,       // [P, K * D / 16, S, 16]
};

// Raises std::invalid_argument: sizes that the kernels do not support.
inline KvStrides kv_strides(KvLayout layout, int64_t kv_heads, int64_t block_size, int64_t head_size) {
  check_range(kv_heads, 1, 1024, "kv_heads");
  check_range(block_size, 1, 1024, "block_size");
  check(head_size >= 16 && head_size <= 256 && head_size % 16 == 0, "head_size",
        std::to_string(head_size) + " is not a multiple of 16 from 16 to 256");
  const int32_t heads = field(kv_heads, "kv_heads"), tokens = field(block_size, "block_size"),
                size = field(head_size, "head_size"), block = field(kv_heads * block_size * head_size, "block");
  switch (layout) {
    case KvLayout::kBlockTokenHead:
      return {block, size, heads * size, size, size};
    case KvLayout::kBlockHeadToken:
      return {block, tokens * size, size, size, size};
    case KvLayout::kFractalNz:
      return {block, tokens * size, 16, tokens * 16, 16};
  }
  check(false, "layout", "unknown");
  return {};
}

}  // namespace ascend_npu
