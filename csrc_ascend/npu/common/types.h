// Data types; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

// Of activations and caches.
enum class DataType : int32_t { kFloat16 = 0, kBFloat16 = 1 };

}  // namespace ascend_npu
