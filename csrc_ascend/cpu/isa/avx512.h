// AVX-512 without BF16 instructions: bfloat16 is rounded with integer and multiplied with float32 instructions.
#pragma once

#include "cpu/isa/avx512_base.h"

namespace ascend_vllm {
namespace {

constexpr bool kHasPairDots = false;  // dot_pairs takes several instructions
struct PairBF16 {
  __m512i bits;
};

inline __m256i narrow_bf16(VecF v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
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
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a.bits, 16)),
                        _mm512_castsi512_ps(_mm512_slli_epi32(b.bits, 16)), acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a.bits, high)),
                         _mm512_castsi512_ps(_mm512_and_si512(b.bits, high)), acc);
}

}  // namespace
}  // namespace ascend_vllm
