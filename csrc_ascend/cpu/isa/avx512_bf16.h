// AVX-512 with BF16 instructions: rounding and pair dot products are one instruction each.
//
// Both treat subnormal bfloat16 numbers as zero, as the hardware does.
#pragma once

#include "cpu/isa/avx512_base.h"

namespace ascend_vllm {
namespace {

constexpr bool kHasPairDots = true;  // dot_pairs is one instruction
struct PairBF16 {
  __m512i bits;
};

inline __m256i narrow_bf16(VecF v) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)); }
inline void store(bfloat16* p, VecF v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(v)); }
inline void store_n(bfloat16* p, VecF v, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(v)); }

inline PairBF16 load_pairs(const bfloat16* p) { return {_mm512_loadu_si512(p)}; }
inline PairBF16 load_pairs_n(const bfloat16* p, int n) { return {_mm512_maskz_loadu_epi16((1u << n) - 1, p)}; }
inline PairBF16 set1_pair(const bfloat16* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return {_mm512_set1_epi32(bits)};
}
inline VecF even_of_pairs(PairBF16 a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a.bits, 16)); }
inline VecF odd_of_pairs(PairBF16 a) {
  return _mm512_castsi512_ps(_mm512_and_si512(a.bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline VecF dot_pairs(VecF acc, PairBF16 a, PairBF16 b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a.bits), reinterpret_cast<__m512bh>(b.bits));
}

}  // namespace
}  // namespace ascend_vllm
