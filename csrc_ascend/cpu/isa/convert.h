// Scalar conversions between storage types and float32, used by tails and by every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace ascend_vllm {
namespace {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Moves the exponent's bias from 15 to 127 by a multiplication, which is right for subnormals too.
  const float shifted = bits_to_float(magnitude << 13) * 0x1p112f;
  return bits_to_float(sign | float_to_bits(shifted));
}

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bfloat16 from_float<bfloat16>(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // quiet NaN
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};                   // nearest even
}
template <>
inline float16 from_float<float16>(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to 65536 or more
  if (magnitude < 0x38800000) {
    // Subnormal result: adding 0.5 makes the FPU round to the last subnormal bit.
    const uint32_t rounded = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return {static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13)};
}

}  // namespace
}  // namespace ascend_vllm
