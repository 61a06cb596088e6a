// Loads of one-byte numbers, for every instruction set: include after cpu/isa/<isa>.h.
//
//   load(p), load_n(p, n), to_float(x) of int8_t, float8_e4m3 and float8_e5m2, as of the wider types
#pragma once

#include "cpu/isa/convert.h"

namespace ascend_vllm {
namespace {

inline float to_float(int8_t x) { return x; }
// The upper half of a float16 has the bits of a float8_e5m2.
inline float to_float(float8_e5m2 x) { return to_float(float16{static_cast<uint16_t>(x.bits << 8)}); }
// Both NaNs have all bits but the sign set. Otherwise the bias of the exponent is 8 less than float16's.
inline float to_float(float8_e4m3 x) {
  const int magnitude = x.bits & 0x7f, sign = (x.bits & 0x80) << 8;
  if (magnitude == 0x7f) return to_float(float16{static_cast<uint16_t>(sign | 0x7e00)});
  return to_float(float16{static_cast<uint16_t>(sign | magnitude << 7)}) * 256.0f;
}

#if defined(__AVX512F__)

inline VecF load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m256i load_wide(const void* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline VecF load(const float8_e5m2* p) { return _mm512_cvtph_ps(_mm256_slli_epi16(load_wide(p), 8)); }
inline VecF load(const float8_e4m3* p) {
  const __m256i bytes = load_wide(p);
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x80)), 8);
  const __m256i size = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
  const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f));
  __m256i halves = _mm256_or_si256(sign, _mm256_slli_epi16(size, 7));
  halves = _mm256_mask_mov_epi16(halves, is_nan, _mm256_set1_epi16(0x7e00));
  return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
}

#elif defined(__AVX2__)

inline VecF load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m128i load_wide(const void* p) {
  return _mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
inline VecF load(const float8_e5m2* p) { return _mm256_cvtph_ps(_mm_slli_epi16(load_wide(p), 8)); }
inline VecF load(const float8_e4m3* p) {
  const __m128i bytes = load_wide(p);
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(bytes, _mm_set1_epi16(0x80)), 8);
  const __m128i size = _mm_and_si128(bytes, _mm_set1_epi16(0x7f));
  const __m128i is_nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
  const __m128i halves = _mm_or_si128(sign, _mm_slli_epi16(size, 7));
  const __m128i exact = _mm_blendv_epi8(halves, _mm_set1_epi16(0x7e00), is_nan);
  return _mm256_mul_ps(_mm256_cvtph_ps(exact), _mm256_set1_ps(256.0f));
}

#elif defined(ASCEND_VLLM_NEON)

inline int16x8_t load_wide(const void* p) {
  int8x8_t bytes = {};
  std::memcpy(&bytes, p, kLanes);
  return vmovl_s8(bytes);
}
inline VecF load(const int8_t* p) { return vcvtq_f32_s32(vmovl_s16(vget_low_s16(load_wide(p)))); }
inline uint16x4_t load_high(const void* p) {
  return vshl_n_u16(vreinterpret_u16_s16(vget_low_s16(load_wide(p))), 8);
}
inline VecF load(const float8_e5m2* p) { return widen_f16(load_high(p)); }
inline VecF load(const float8_e4m3* p) {
  const uint16x4_t bits = load_high(p), size = vand_u16(bits, vdup_n_u16(0x7f00));
  const uint16x4_t halves = vorr_u16(vand_u16(bits, vdup_n_u16(0x8000)), vshr_n_u16(size, 1));
  const uint16x4_t exact = vbsl_u16(vceq_u16(size, vdup_n_u16(0x7f00)), vdup_n_u16(0x7e00), halves);
  return vmulq_n_f32(widen_f16(exact), 256.0f);
}

#else

template <class Byte>
inline VecF load_bytes_of(const Byte* p) {
  VecF v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
}
inline VecF load(const int8_t* p) { return load_bytes_of(p); }
inline VecF load(const float8_e4m3* p) { return load_bytes_of(p); }
inline VecF load(const float8_e5m2* p) { return load_bytes_of(p); }

#endif

template <class Byte>
inline VecF load_rest(const Byte* p, int n) {
  Byte buffer[kLanes] = {};
  std::memcpy(buffer, p, n);
  return load(buffer);
}
inline VecF load_n(const int8_t* p, int n) { return load_rest(p, n); }
inline VecF load_n(const float8_e4m3* p, int n) { return load_rest(p, n); }
inline VecF load_n(const float8_e5m2* p, int n) { return load_rest(p, n); }

}  // namespace
}  // namespace ascend_vllm
