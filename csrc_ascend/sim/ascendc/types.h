// Ascend C's number types on the host, with the conversions that its Cast rounds by.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

using half = _Float16;

// bfloat16: storage and conversion only, as on the chip, whose vector unit computes in float.
struct bfloat16_t {
  std::uint16_t bits = 0;

  bfloat16_t() = default;
  // Rounds to nearest, ties to even; NaN stays NaN.
  explicit bfloat16_t(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    bits = std::isnan(value) ? 0x7FC0 : static_cast<std::uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const std::uint32_t word = std::uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

namespace AscendC {

enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

}  // namespace AscendC
