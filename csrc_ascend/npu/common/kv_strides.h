// Strides of a paged cache, a part of the kernels' parameters; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

// In elements.
struct KvStrides {
  int32_t block;  // from a block to the next one
  int32_t head;
  int32_t token;
  int32_t segment;         // from a segment of a head to the next one
  int32_t segment_length;  // elements of a segment
};

}  // namespace ascend_npu
