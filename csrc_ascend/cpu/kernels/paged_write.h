// Writes keys and values into a paged cache: as they are, or rounded to one byte. Include after cpu/isa/math.h.
#pragma once

#include "cpu/isa/bytes.h"
#include "cpu/isa/integers.h"
#include "cpu/kernels/paged_cache.h"

namespace ascend_vllm {
namespace {

// Of a format of one byte: the largest number, and lanes rounded to it, as signed bytes in float lanes. Numbers
// that are too large become the largest one.
struct Int8Rounding {
  static constexpr float kLargest = 127.0f;
  static VecF bytes(VecF x) { return round_nearest(max(min(x, set1(kLargest)), set1(-kLargest - 1.0f))); }
};

// kBias: of exponents, which follow the kMantissa lowest bits. NaN has all bits of the magnitude set.
template <int kMantissa, int kBias, int kLargestByte>
struct Float8Rounding {
  static constexpr float kLargest = (1.0f + (kLargestByte % (1 << kMantissa)) / float(1 << kMantissa)) *
                                    float(1 << ((kLargestByte >> kMantissa) - kBias));
  static VecF bytes(VecF x) {
    constexpr int kDropped = 23 - kMantissa;
    constexpr float kLeastNormal = 1.0f / float(1 << (kBias - 1));
    const VecF size = min(abs(x), set1(kLargest));
    float stored[kLanes];
    store(stored, size);
    const VecI wide = load_i(stored);
    // to nearest, ties to even
    const VecI odd = and_i(shift_right<kDropped>(wide), set1_i(1));
    const VecI rounded = add_i(wide, add_i(odd, set1_i((1 << (kDropped - 1)) - 1)));
    const VecI normal = sub_i(shift_right<kDropped>(rounded), set1_i((127 - kBias) << kMantissa));
    const VecF subnormal = round_nearest(size * set1(float(1 << kMantissa) / kLeastNormal));
    VecF byte = select(gt(set1(kLeastNormal), size), subnormal, to_float(normal));
    byte = select(ge(abs(x), set1(0.0f)), byte, set1(127.0f));
    return select(gt(set1(0.0f), x), byte - set1(128.0f), byte);
  }
};
using Float8E4m3Rounding = Float8Rounding<3, 7, 0x7e>;
using Float8E5m2Rounding = Float8Rounding<2, 15, 0x7b>;
static_assert(Float8E4m3Rounding::kLargest == 448.0f && Float8E5m2Rounding::kLargest == 57344.0f);

// The scale at which the largest number of a row becomes `largest`, rounded up to bfloat16; NaN if a number is
// not finite.
template <class T>
inline bfloat16 row_scale(const T* x, int64_t size, float largest) {
  VecF greatest = set1(0.0f), not_finite = set1(0.0f);
  const auto add = [&](VecF v) {
    greatest = max(greatest, abs(v));
    not_finite = fma(v, set1(0.0f), not_finite);
  };
  for_lanes(size, [&](int64_t d) { add(load(x + d)); }, [&](int64_t d, int rest) { add(load_n(x + d, rest)); });
  const float scale = reduce_max(greatest) / largest;
  if (reduce_add(not_finite) != 0.0f) return {0x7fc0};
  return {static_cast<uint16_t>((float_to_bits(scale) + 0xffff) >> 16)};
}

template <class Rounding, class T>
inline void round_row(const T* x, int64_t size, float scale, int8_t* to) {
  const VecF divisor = set1(scale);
  for_lanes(
      size, [&](int64_t d) { store_int8(to + d, Rounding::bytes(load(x + d) / divisor)); },
      [&](int64_t d, int rest) {
        int8_t bytes[kLanes];
        store_int8(bytes, Rounding::bytes(load_n(x + d, rest) / divisor));
        __builtin_memcpy(to + d, bytes, rest);
      });
}

// Where the numbers and the scale of one key or value are.
struct RowPlace {
  int64_t numbers, scale;
};
inline RowPlace row_place(const PagedCache& cache, int64_t slot, int64_t head) {
  const int64_t plane = slot / cache.block_size * cache.kv_heads + head, offset = slot % cache.block_size;
  return {plane * cache.head_stride + offset * cache.head_size, plane * cache.scale_head_stride + offset};
}

// own_scale: where the scale of these numbers goes; null: it is `scale`.
template <class Rounding, class T>
inline void write_bytes(const T* x, int64_t size, int8_t* to, bfloat16* own_scale, float scale) {
  if (own_scale != nullptr) {
    *own_scale = row_scale(x, size, Rounding::kLargest);
    scale = to_float(*own_scale);
    if (!(scale > 0.0f)) {
      __builtin_memset(to, 0, size);
      return;
    }
  }
  round_row<Rounding>(x, size, scale, to);
}

// Writes numbers to element `at` of a cache.
template <class T>
inline void write_numbers(CacheFormat format, const T* x, int64_t size, void* cache, int64_t at,
                          bfloat16* own_scale, float scale) {
  int8_t* to = static_cast<int8_t*>(cache) + at;
  switch (format) {
    case CacheFormat::kSame:
      __builtin_memcpy(static_cast<T*>(cache) + at, x, size * sizeof(T));
      return;
    case CacheFormat::kInt8:
      return write_bytes<Int8Rounding>(x, size, to, own_scale, scale);
    case CacheFormat::kFloat8E4m3:
      return write_bytes<Float8E4m3Rounding>(x, size, to, own_scale, scale);
    case CacheFormat::kFloat8E5m2:
      return write_bytes<Float8E5m2Rounding>(x, size, to, own_scale, scale);
  }
}

// scales: of their own, or null; scale: of all numbers.
template <class T>
inline void write_row(const PagedCache& cache, void* numbers, bfloat16* scales, float scale, RowPlace place,
                      const T* x) {
  bfloat16* own_scale = scales == nullptr ? nullptr : scales + place.scale;
  write_numbers(cache.format, x, cache.head_size, numbers, place.numbers, own_scale, scale);
}

template <class T>
inline void write_key(const PagedCache& cache, RowPlace place, const T* key) {
  write_row(cache, cache.keys, cache.key_scales, cache.key_scale, place, key);
}
template <class T>
inline void write_value(const PagedCache& cache, RowPlace place, const T* value) {
  write_row(cache, cache.values, cache.value_scales, cache.value_scale, place, value);
}

}  // namespace
}  // namespace ascend_vllm
