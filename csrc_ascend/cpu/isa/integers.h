// Vectors of kLanes 32-bit integers, for every instruction set: include after cpu/isa/<isa>.h.
//
//   VecI: load_i, store_i, set1_i, zero_i, add_i, sub_i, mul_i, and_i, or_i, shift_right<n> (zeros enter),
//   shift_left<n>, to_float (of signed numbers), as_float (the bits), load_bytes (kLanes unsigned bytes),
//   sub_halves (of 16-bit halves), dot_halves(acc, a, b): acc + the dot product of signed 16-bit pairs;
//   where kHasByteDots (ASCEND_VLLM_BYTE_DOTS), dot_bytes(acc, byte_operand(a), b): acc + the dot product of
//   four unsigned bytes, less kByteBias each, and four signed ones; bytes below 128 need no byte_operand and
//   have no bias; store_int16 and store_int8 of integral float lanes within those types' ranges.
// VecI is no __m512i or __m256i, arrays of which GCC 12 stores to memory in each step of a loop.
#pragma once

#include <cstdint>

namespace ascend_vllm {
namespace {

#if defined(__AVX512F__)

typedef int32_t VecI __attribute__((vector_size(64)));
inline VecI load_i(const void* p) { return (VecI)_mm512_loadu_si512(p); }
inline void store_i(void* p, VecI v) { _mm512_storeu_si512(p, (__m512i)v); }
inline VecI set1_i(int32_t x) { return (VecI)_mm512_set1_epi32(x); }
inline VecI add_i(VecI a, VecI b) { return (VecI)_mm512_add_epi32((__m512i)a, (__m512i)b); }
inline VecI sub_i(VecI a, VecI b) { return (VecI)_mm512_sub_epi32((__m512i)a, (__m512i)b); }
inline VecI mul_i(VecI a, VecI b) { return (VecI)_mm512_mullo_epi32((__m512i)a, (__m512i)b); }
inline VecI and_i(VecI a, VecI b) { return (VecI)_mm512_and_si512((__m512i)a, (__m512i)b); }
inline VecI or_i(VecI a, VecI b) { return (VecI)_mm512_or_si512((__m512i)a, (__m512i)b); }
template <int kBits>
inline VecI shift_right(VecI a) {
  return (VecI)_mm512_srli_epi32((__m512i)a, kBits);
}
template <int kBits>
inline VecI shift_left(VecI a) {
  return (VecI)_mm512_slli_epi32((__m512i)a, kBits);
}
inline VecF to_float(VecI a) { return _mm512_cvtepi32_ps((__m512i)a); }
inline VecF as_float(VecI a) { return _mm512_castsi512_ps((__m512i)a); }
inline VecI load_bytes(const uint8_t* p) {
  return (VecI)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline VecI sub_halves(VecI a, VecI b) { return (VecI)_mm512_sub_epi16((__m512i)a, (__m512i)b); }
inline void store_int16(int16_t* p, VecF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v)));
}
inline void store_int8(int8_t* p, VecF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
#ifdef __AVX512VNNI__
#define ASCEND_VLLM_BYTE_DOTS
inline VecI dot_halves(VecI acc, VecI a, VecI b) {
  return (VecI)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}
inline VecI dot_bytes(VecI acc, VecI a, VecI b) {
  return (VecI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}
#else
inline VecI dot_halves(VecI acc, VecI a, VecI b) {
  return (VecI)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16((__m512i)a, (__m512i)b));
}
inline VecI dot_bytes(VecI acc, VecI, VecI) { return acc; }
#endif

#elif defined(__AVX2__)

typedef int32_t VecI __attribute__((vector_size(32)));
inline VecI load_i(const void* p) { return (VecI)_mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_i(void* p, VecI v) { _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)v); }
inline VecI set1_i(int32_t x) { return (VecI)_mm256_set1_epi32(x); }
inline VecI add_i(VecI a, VecI b) { return (VecI)_mm256_add_epi32((__m256i)a, (__m256i)b); }
inline VecI sub_i(VecI a, VecI b) { return (VecI)_mm256_sub_epi32((__m256i)a, (__m256i)b); }
inline VecI mul_i(VecI a, VecI b) { return (VecI)_mm256_mullo_epi32((__m256i)a, (__m256i)b); }
inline VecI and_i(VecI a, VecI b) { return (VecI)_mm256_and_si256((__m256i)a, (__m256i)b); }
inline VecI or_i(VecI a, VecI b) { return (VecI)_mm256_or_si256((__m256i)a, (__m256i)b); }
template <int kBits>
inline VecI shift_right(VecI a) {
  return (VecI)_mm256_srli_epi32((__m256i)a, kBits);
}
template <int kBits>
inline VecI shift_left(VecI a) {
  return (VecI)_mm256_slli_epi32((__m256i)a, kBits);
}
inline VecF to_float(VecI a) { return _mm256_cvtepi32_ps((__m256i)a); }
inline VecF as_float(VecI a) { return _mm256_castsi256_ps((__m256i)a); }
inline VecI load_bytes(const uint8_t* p) {
  return (VecI)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline VecI sub_halves(VecI a, VecI b) { return (VecI)_mm256_sub_epi16((__m256i)a, (__m256i)b); }
inline __m128i narrow_int16(VecF v) {
  const __m256i wide = _mm256_cvtps_epi32(v);
  return _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
inline void store_int16(int16_t* p, VecF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_int16(v));
}
inline void store_int8(int8_t* p, VecF v) {
  const __m128i halves = narrow_int16(v);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
inline VecI dot_halves(VecI acc, VecI a, VecI b) {
  return (VecI)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16((__m256i)a, (__m256i)b));
}
inline VecI dot_bytes(VecI acc, VecI, VecI) { return acc; }

#elif defined(ASCEND_VLLM_NEON)

typedef int32_t VecI __attribute__((vector_size(16)));
inline VecI load_i(const void* p) { return (VecI)vld1q_s32(static_cast<const int32_t*>(p)); }
inline void store_i(void* p, VecI v) { vst1q_s32(static_cast<int32_t*>(p), (int32x4_t)v); }
inline VecI set1_i(int32_t x) { return (VecI)vdupq_n_s32(x); }
inline VecI add_i(VecI a, VecI b) { return (VecI)vaddq_s32((int32x4_t)a, (int32x4_t)b); }
inline VecI sub_i(VecI a, VecI b) { return (VecI)vsubq_s32((int32x4_t)a, (int32x4_t)b); }
inline VecI mul_i(VecI a, VecI b) { return (VecI)vmulq_s32((int32x4_t)a, (int32x4_t)b); }
inline VecI and_i(VecI a, VecI b) { return (VecI)vandq_s32((int32x4_t)a, (int32x4_t)b); }
inline VecI or_i(VecI a, VecI b) { return (VecI)vorrq_s32((int32x4_t)a, (int32x4_t)b); }
template <int kBits>
inline VecI shift_right(VecI a) {
  if constexpr (kBits == 0)
    return a;  // no such instruction
  else
    return (VecI)vshrq_n_u32((uint32x4_t)a, kBits);
}
template <int kBits>
inline VecI shift_left(VecI a) {
  return (VecI)vshlq_n_u32((uint32x4_t)a, kBits);
}
inline VecF to_float(VecI a) { return vcvtq_f32_s32((int32x4_t)a); }
inline VecF as_float(VecI a) { return vreinterpretq_f32_s32((int32x4_t)a); }
inline VecI load_bytes(const uint8_t* p) {
  uint8x8_t bytes = {};
  __builtin_memcpy(&bytes, p, kLanes);
  return (VecI)vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
}
inline VecI sub_halves(VecI a, VecI b) { return (VecI)vsubq_s16((int16x8_t)a, (int16x8_t)b); }
inline void store_int16(int16_t* p, VecF v) {
  const int16x4_t halves = vmovn_s32(vcvtnq_s32_f32(v));
  __builtin_memcpy(p, &halves, sizeof halves);
}
inline void store_int8(int8_t* p, VecF v) {
  const int16x4_t halves = vmovn_s32(vcvtnq_s32_f32(v));
  const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
  __builtin_memcpy(p, &bytes, kLanes);
}
inline VecI dot_halves(VecI acc, VecI a, VecI b) {
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
  return (VecI)vaddq_s32((int32x4_t)acc, vpaddq_s32(low, high));
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define ASCEND_VLLM_BYTE_DOTS
inline VecI dot_bytes(VecI acc, VecI a, VecI b) {
  return (VecI)vusdotq_s32((int32x4_t)acc, (uint8x16_t)a, (int8x16_t)b);
}
#elif defined(__ARM_FEATURE_DOTPROD)
// Of signed bytes only.
#define ASCEND_VLLM_BYTE_DOTS
#define ASCEND_VLLM_SIGNED_BYTE_DOTS
inline VecI dot_bytes(VecI acc, VecI a, VecI b) {
  return (VecI)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
}
#else
inline VecI dot_bytes(VecI acc, VecI, VecI) { return acc; }
#endif

#else

typedef uint32_t VecI __attribute__((vector_size(16)));
typedef int32_t SignedLanes __attribute__((vector_size(16)));
typedef uint16_t HalfLanes __attribute__((vector_size(16)));
inline VecI load_i(const void* p) {
  VecI v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store_i(void* p, VecI v) { std::memcpy(p, &v, sizeof v); }
inline VecI set1_i(int32_t x) {
  const uint32_t bits = static_cast<uint32_t>(x);
  return VecI{bits, bits, bits, bits};
}
inline VecI add_i(VecI a, VecI b) { return a + b; }
inline VecI sub_i(VecI a, VecI b) { return a - b; }
inline VecI mul_i(VecI a, VecI b) { return a * b; }
inline VecI and_i(VecI a, VecI b) { return a & b; }
inline VecI or_i(VecI a, VecI b) { return a | b; }
template <int kBits>
inline VecI shift_right(VecI a) {
  return a >> kBits;
}
template <int kBits>
inline VecI shift_left(VecI a) {
  return a << kBits;
}
inline VecF to_float(VecI a) { return __builtin_convertvector((SignedLanes)a, VecF); }
inline VecF as_float(VecI a) { return (VecF)a; }
inline VecI load_bytes(const uint8_t* p) { return VecI{p[0], p[1], p[2], p[3]}; }
inline VecI sub_halves(VecI a, VecI b) { return (VecI)((HalfLanes)a - (HalfLanes)b); }
inline void store_int16(int16_t* p, VecF v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(v[i]);
}
inline void store_int8(int8_t* p, VecF v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v[i]);
}
inline VecI dot_halves(VecI acc, VecI a, VecI b) {
  const SignedLanes low = ((SignedLanes)(a << 16) >> 16) * ((SignedLanes)(b << 16) >> 16);
  const SignedLanes high = ((SignedLanes)a >> 16) * ((SignedLanes)b >> 16);
  return acc + (VecI)low + (VecI)high;
}
inline VecI dot_bytes(VecI acc, VecI, VecI) { return acc; }

#endif

#ifdef ASCEND_VLLM_BYTE_DOTS
constexpr bool kHasByteDots = true;
#else
constexpr bool kHasByteDots = false;
#endif
#ifdef ASCEND_VLLM_SIGNED_BYTE_DOTS
constexpr int32_t kByteBias = 128;
inline VecI byte_operand(VecI a) { return a ^ set1_i(static_cast<int32_t>(0x80808080u)); }
#else
constexpr int32_t kByteBias = 0;
inline VecI byte_operand(VecI a) { return a; }
#endif

}  // namespace
}  // namespace ascend_vllm
