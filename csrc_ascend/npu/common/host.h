// Shared by the tiling of all kernels: the chip's sizes and argument checks. Host code.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace ascend_npu {

// The unified buffer without the toolchain's part: 256 bytes, and 8 KiB of scratch for instructions.
constexpr int64_t kUnifiedBufferBytes = 192 * 1024 - 256 - 8 * 1024;
constexpr int64_t kMaxCores = 65535;

// Raises std::invalid_argument "name: why".
inline void check(bool condition, const char* name, const std::string& why) {
  if (!condition) throw std::invalid_argument(std::string(name) + ": " + why);
}

inline void check_range(int64_t value, int64_t least, int64_t most, const char* name) {
  check(value >= least && value <= most, name,
        std::to_string(value) + " is not in " + std::to_string(least) + " … " + std::to_string(most));
}

// A field of a kernel's parameters.
inline int32_t field(int64_t value, const char* name) {
  check_range(value, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(), name);
  return static_cast<int32_t>(value);
}

// Number of cores for an amount of work.
inline uint32_t cores_for(int64_t items, int64_t cores) {
  check_range(cores, 1, kMaxCores, "cores");
  return static_cast<uint32_t>(items < 1 ? 1 : items < cores ? items : cores);
}

}  // namespace ascend_npu
