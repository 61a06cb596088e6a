// Arithmetic of the scalar unit for sampling: sums in fixed point, floats in order, random numbers. Device
// code.
#pragma once

#include "npu/common/device.h"

namespace ascend_npu {

// Bits behind the binary point of a sum; with at most 2^18 weights of at most 1 it stays below 2^63.
constexpr int32_t kFraction = 44;

union FloatBits {
  float value;
  uint32_t bits;
};

__aicore__ inline float float_of(uint32_t bits) {
  FloatBits number;
  number.bits = bits;
  return number.value;
}

__aicore__ inline uint32_t bits_of(float value) {
  FloatBits number;
  number.value = value;
  return number.bits;
}

constexpr uint32_t kMinusInfinity = 0xFF800000;

// value * 2^kFraction, rounded down; value: finite, not negative, below 2^18.
__aicore__ inline uint64_t fixed_of(float value) {
  const uint32_t bits = bits_of(value);
  const int32_t exponent = static_cast<int32_t>(bits >> 23);
  if (exponent == 0) return 0;
  const uint64_t mantissa = (bits & 0x7FFFFF) | 0x800000;
  const int32_t shift = exponent - 150 + kFraction;
  if (shift >= 0) return mantissa << shift;
  return shift > -64 ? mantissa >> -shift : 0;
}

// The upper 64 bits of the product.
__aicore__ inline uint64_t multiply_high(uint64_t a, uint64_t b) {
  const uint64_t a_low = a & 0xFFFFFFFF, a_high = a >> 32, b_low = b & 0xFFFFFFFF, b_high = b >> 32;
  const uint64_t middle = a_high * b_low + (a_low * b_low >> 32);
  const uint64_t other = a_low * b_high + (middle & 0xFFFFFFFF);
  return a_high * b_high + (middle >> 32) + (other >> 32);
}

// `sum` times a float in (0, 1), rounded down; at least 1.
__aicore__ inline uint64_t part_of(uint64_t sum, float part) {
  const uint32_t bits = bits_of(part);
  // the part as 64 bits behind the binary point
  const int32_t shift = static_cast<int32_t>(bits >> 23) - 150 + 64;
  const uint64_t mantissa = (bits & 0x7FFFFF) | 0x800000;
  const uint64_t fraction = shift >= 0 ? mantissa << shift : shift > -24 ? mantissa >> -shift : 0;
  const uint64_t result = multiply_high(sum, fraction);
  return result > 0 ? result : 1;
}

// Integers in the order of their floats, and back.
__aicore__ inline int32_t key_of(float value) {
  const int32_t bits = static_cast<int32_t>(bits_of(value));
  return bits >= 0 ? bits : bits ^ 0x7FFFFFFF;
}

__aicore__ inline float float_of_key(int32_t key) {
  return float_of(static_cast<uint32_t>(key >= 0 ? key : key ^ 0x7FFFFFFF));
}

// 53 random bits, the upper ones of the result: Philox4x32-10 (Salmon et al., 2011) keyed by the seed, at
// counter `position`, as `philox_uniform` of the op references.
__aicore__ inline uint64_t uniform_bits(int64_t seed, int64_t position) {
  uint32_t c0 = static_cast<uint32_t>(position),
           c1 = static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  for (int32_t round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53) * c0,
                   product1 = static_cast<uint64_t>(0xCD9E8D57) * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  const uint64_t number = (static_cast<uint64_t>(c0) >> 5) << 26 | c1 >> 6;
  return number << 11;
}

}  // namespace ascend_npu
