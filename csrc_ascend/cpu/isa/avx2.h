// AVX2 with FMA and F16C: eight float lanes. The names are described in scalar.h.
#pragma once

#include <immintrin.h>

#include "cpu/isa/convert.h"

namespace ascend_vllm {
namespace {

constexpr int kLanes = 8;
// Registers: 16. A panel of 16 columns takes two.
constexpr int kMaxRows = 6, kMaxPairRows = 5;
constexpr int panels_of(int rows, bool are_pairs) {
  return rows == 1 ? 4 : rows <= (are_pairs ? 2 : 3) ? 2 : 1;
}
using VecF = __m256;
struct Mask {
  __m256 lanes;
};
constexpr bool kHasPairDots = false;  // dot_pairs takes several instructions
struct PairBF16 {
  __m256i bits;
};

inline VecF set1(float x) { return _mm256_set1_ps(x); }
inline VecF load(const float* p) { return _mm256_loadu_ps(p); }
inline VecF widen_bf16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline VecF load(const bfloat16* p) { return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline VecF load(const float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline VecF load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
template <class T>
inline VecF load_n(const T* p, int n) {
  alignas(16) T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

inline void store(float* p, VecF v) { _mm256_storeu_ps(p, v); }
inline void store(float16* p, VecF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bfloat16* p, VecF v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  rounded = _mm256_blendv_epi8(rounded, quiet_nan, _mm256_castps_si256(is_nan));
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store_n(float* p, VecF v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
template <class T>
inline void store_n(T* p, VecF v, int n) {
  alignas(16) T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

inline VecF fma(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
inline Mask gt(VecF a, VecF b) { return {_mm256_cmp_ps(a, b, _CMP_GT_OQ)}; }
inline Mask ge(VecF a, VecF b) { return {_mm256_cmp_ps(a, b, _CMP_GE_OQ)}; }
inline VecF select(Mask mask, VecF yes, VecF no) { return _mm256_blendv_ps(no, yes, mask.lanes); }
inline unsigned bits(Mask mask) { return static_cast<unsigned>(_mm256_movemask_ps(mask.lanes)); }
inline int count(Mask mask) { return __builtin_popcount(_mm256_movemask_ps(mask.lanes)); }
inline VecF max(VecF a, VecF b) { return _mm256_max_ps(a, b); }
inline VecF min(VecF a, VecF b) { return _mm256_min_ps(a, b); }
inline VecF sqrt(VecF a) { return _mm256_sqrt_ps(a); }
inline VecF abs(VecF a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline VecF round_nearest(VecF a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline VecF pow2i(VecF n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline float reduce_add(VecF a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float reduce_max(VecF a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline PairBF16 load_pairs(const bfloat16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline PairBF16 load_pairs_n(const bfloat16* p, int n) {
  alignas(32) bfloat16 buffer[2 * kLanes] = {};
  std::memcpy(buffer, p, n * sizeof *p);
  return load_pairs(buffer);
}
inline PairBF16 set1_pair(const bfloat16* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return {_mm256_set1_epi32(bits)};
}
inline VecF even_of_pairs(PairBF16 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a.bits, 16)); }
inline VecF odd_of_pairs(PairBF16 a) {
  return _mm256_castsi256_ps(_mm256_and_si256(a.bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline VecF dot_pairs(VecF acc, PairBF16 a, PairBF16 b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a.bits, 16)),
                        _mm256_castsi256_ps(_mm256_slli_epi32(b.bits, 16)), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a.bits, high)),
                         _mm256_castsi256_ps(_mm256_and_si256(b.bits, high)), acc);
}

}  // namespace
}  // namespace ascend_vllm
