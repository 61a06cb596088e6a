// AVX-512 (F, BW, VL, DQ): sixteen float lanes; what avx512.h and avx512_bf16.h share. Names as in scalar.h.
#pragma once

#include <immintrin.h>

#include "cpu/isa/convert.h"

namespace ascend_vllm {
namespace {

constexpr int kLanes = 16;
// Registers: 32. A panel of 16 columns takes one.
constexpr int kMaxRows = 6, kMaxPairRows = 6;
constexpr int panels_of(int, bool) { return 4; }
using VecF = __m512;
struct Mask {
  __mmask16 lanes;
};

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline VecF widen_bf16(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline VecF set1(float x) { return _mm512_set1_ps(x); }
inline VecF load(const float* p) { return _mm512_loadu_ps(p); }
inline VecF load(const bfloat16* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline VecF load(const float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline VecF load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline VecF load_n(const bfloat16* p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline VecF load_n(const float16* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

inline void store(float* p, VecF v) { _mm512_storeu_ps(p, v); }
inline void store_n(float* p, VecF v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
inline __m256i narrow_f16(VecF v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline void store(float16* p, VecF v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(v)); }
inline void store_n(float16* p, VecF v, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_f16(v)); }

inline VecF fma(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
inline Mask gt(VecF a, VecF b) { return {_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)}; }
inline Mask ge(VecF a, VecF b) { return {_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ)}; }
inline VecF select(Mask mask, VecF yes, VecF no) { return _mm512_mask_blend_ps(mask.lanes, no, yes); }
inline unsigned bits(Mask mask) { return mask.lanes; }
inline int count(Mask mask) { return __builtin_popcount(mask.lanes); }
inline VecF max(VecF a, VecF b) { return _mm512_max_ps(a, b); }
inline VecF min(VecF a, VecF b) { return _mm512_min_ps(a, b); }
inline VecF sqrt(VecF a) { return _mm512_sqrt_ps(a); }
inline VecF abs(VecF a) { return _mm512_abs_ps(a); }
inline VecF round_nearest(VecF a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline VecF pow2i(VecF n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

// 2^t; 0 for -inf, infinity above 128, NaN for NaN. Relative error below 9e-5, a twentieth of what rounding to
// bfloat16 does. 2^t = 2^n 2^f with n the greatest integer below; 2^f = 1 + f q(f), q fitted for the least
// greatest relative error.
inline VecF exp2_coarse(VecF t) {
  constexpr int kDownwards = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const VecF f = _mm512_reduce_ps(t, kDownwards);
  VecF p = set1(7.706719740e-2f);
  p = fma(p, f, set1(2.276448219e-1f));
  p = fma(p, f, set1(6.951168245e-1f));
  p = fma(p, f, set1(1.0f));
  return _mm512_scalef_ps(p, t);
}

inline float reduce_add(VecF a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(VecF a) { return _mm512_reduce_max_ps(a); }

}  // namespace
}  // namespace ascend_vllm
