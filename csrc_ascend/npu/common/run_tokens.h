// Tokens of one adapter that a core takes at a time; host and device.
#pragma once

#include <cstdint>

namespace ascend_npu {

constexpr int32_t kRunTokens = 32;

}  // namespace ascend_npu
