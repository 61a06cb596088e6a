// NEON of Armv8-A: four float lanes. The names are described in scalar.h.
//
// With BF16 instructions a dot product of pairs is one instruction (BFDOT), which takes subnormal bfloat16
// numbers for zero and rounds sums to odd (Arm Architecture Reference Manual, FPProcessDenorms and BFDotAdd).
#pragma once

#define ASCEND_VLLM_NEON

#include <arm_neon.h>

#include "cpu/isa/convert.h"

namespace ascend_vllm {
namespace {

constexpr int kLanes = 4;
// Registers: 32. A panel of 16 columns takes four.
constexpr int kMaxRows = 6, kMaxPairRows = 5;
constexpr int panels_of(int rows, bool are_pairs) { return rows <= (are_pairs ? 2 : 3) ? 2 : 1; }
using VecF = float32x4_t;
struct Mask {
  uint32x4_t lanes;
};
struct PairBF16 {
  uint32x4_t bits;
};

inline VecF set1(float x) { return vdupq_n_f32(x); }
inline VecF widen_bf16(uint16x4_t halves) { return vreinterpretq_f32_u32(vshll_n_u16(halves, 16)); }
inline VecF widen_f16(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }
inline VecF load(const float* p) { return vld1q_f32(p); }
inline uint16x4_t load_halves(const void* p) {
  uint16x4_t halves;
  std::memcpy(&halves, p, sizeof halves);
  return halves;
}
inline VecF load(const bfloat16* p) { return widen_bf16(load_halves(p)); }
inline VecF load(const float16* p) { return widen_f16(load_halves(p)); }
template <class T>
inline VecF load_n(const T* p, int n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

inline void store(float* p, VecF v) { vst1q_f32(p, v); }
inline void store(float16* p, VecF v) {
  const float16x4_t halves = vcvt_f16_f32(v);
  std::memcpy(p, &halves, sizeof halves);
}
inline void store(bfloat16* p, VecF v) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  const bfloat16x4_t halves = vcvt_bf16_f32(v);
#else
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet_nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
  const uint16x4_t halves = vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet_nan), 16);
#endif
  std::memcpy(p, &halves, sizeof halves);
}
template <class T>
inline void store_n(T* p, VecF v, int n) {
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

inline VecF fma(VecF a, VecF b, VecF c) { return vfmaq_f32(c, a, b); }
inline Mask gt(VecF a, VecF b) { return {vcgtq_f32(a, b)}; }
inline Mask ge(VecF a, VecF b) { return {vcgeq_f32(a, b)}; }
inline VecF select(Mask mask, VecF yes, VecF no) { return vbslq_f32(mask.lanes, yes, no); }
inline unsigned bits(Mask mask) {
  constexpr uint32x4_t kBits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask.lanes, kBits));
}
inline int count(Mask mask) { return static_cast<int>(vaddvq_u32(vshrq_n_u32(mask.lanes, 31))); }
// The second of two numbers one of which is NaN, as on x86; vmaxq_f32 would return NaN.
inline VecF max(VecF a, VecF b) { return select(gt(a, b), a, b); }
inline VecF min(VecF a, VecF b) { return select(gt(b, a), a, b); }
inline VecF sqrt(VecF a) { return vsqrtq_f32(a); }
inline VecF abs(VecF a) { return vabsq_f32(a); }
inline VecF round_nearest(VecF a) { return vrndnq_f32(a); }
inline VecF pow2i(VecF n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline float reduce_add(VecF a) { return vaddvq_f32(a); }
inline float reduce_max(VecF a) {
  const VecF pairs = max(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(max(pairs, vextq_f32(pairs, pairs, 1)), 0);
}

inline PairBF16 load_pairs(const bfloat16* p) { return {vreinterpretq_u32_u16(vld1q_u16(&p->bits))}; }
inline PairBF16 load_pairs_n(const bfloat16* p, int n) {
  bfloat16 buffer[2 * kLanes] = {};
  std::memcpy(buffer, p, n * sizeof *p);
  return load_pairs(buffer);
}
inline PairBF16 set1_pair(const bfloat16* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return {vdupq_n_u32(bits)};
}
inline VecF even_of_pairs(PairBF16 a) { return vreinterpretq_f32_u32(vshlq_n_u32(a.bits, 16)); }
inline VecF odd_of_pairs(PairBF16 a) {
  return vreinterpretq_f32_u32(vandq_u32(a.bits, vdupq_n_u32(0xffff0000u)));
}
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
constexpr bool kHasPairDots = true;  // dot_pairs is one instruction
inline VecF dot_pairs(VecF acc, PairBF16 a, PairBF16 b) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_u32(a.bits), vreinterpretq_bf16_u32(b.bits));
}
#else
constexpr bool kHasPairDots = false;  // dot_pairs takes several instructions
inline VecF dot_pairs(VecF acc, PairBF16 a, PairBF16 b) {
  acc = fma(even_of_pairs(a), even_of_pairs(b), acc);
  return fma(odd_of_pairs(a), odd_of_pairs(b), acc);
}
#endif

}  // namespace
}  // namespace ascend_vllm
