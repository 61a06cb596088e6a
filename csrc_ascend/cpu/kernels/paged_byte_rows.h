// What the kernels for int8 caches and few query rows share: queries and weights as integers.
//
// They have 15 bits, of which the largest of a row is 127 * 128, or 16 where weights have no sign: as accurate
// as 16-bit floating-point numbers need. Each is two bytes, which are multiplied apart; products and sums are
// exact.
#pragma once

#ifdef __AVX512VNNI__

#include "cpu/kernels/paged_row_weights.h"

namespace ascend_vllm {
namespace {

class ByteRows : protected RowWeights<int8_t> {
  using Base = RowWeights<int8_t>;
  static_assert(kMaxDepthRows == 8 && kTileKeys == 64);

 public:
  static constexpr int64_t kDepths = 64;  // of a vector of bytes
  static bool supports(int64_t head_size) { return head_size % kDepths == 0; }

  ByteRows(const HeadBlocks<int8_t>& blocks, const QueryRows& rows, float scale, float* scratch,
           const Fetch& fetch = {})
      : Base(blocks, rows, scale, scratch, fetch), query_bytes_(reinterpret_cast<int8_t*>(queries_)) {}

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    const int64_t size = blocks_.head_size;
    __builtin_memset(query_bytes_, 0, 16 * size);
    for (int64_t i = 0; i < rows_.count(); ++i) {
      float wide[kMaxHeadSize];
      const auto* from = query(rows_.begin + i);
      VecF greatest = set1(0.0f), not_finite = set1(0.0f);
      for (int64_t d = 0; d < size; d += kLanes) {
        const VecF v = load(from + d);
        store(wide + d, v);
        greatest = max(greatest, abs(v));
        not_finite = fma(v, set1(0.0f), not_finite);
      }
      const float largest = reduce_max(greatest);
      query_steps_[i] = largest / kLargest + reduce_add(not_finite);
      query_starts_[i] = 0;
      if (!(query_steps_[i] > 0.0f)) continue;
      const VecF factor = set1(kLargest / largest);
      __m512i sum = _mm512_setzero_si512();
      for (int64_t d = 0; d < size; d += kLanes) {
        const __m512i value = _mm512_cvtps_epi32(load(wide + d) * factor);
        sum = _mm512_add_epi32(sum, value);
        const __m512i high = high_of(value);
        int8_t* to = query_bytes_ + d * 16 + 4 * i;
        store_quads(to, _mm512_cvtepi32_epi8(high));
        store_quads(to + 4 * kMaxDepthRows, _mm512_cvtepi32_epi8(low_of(value, high)));
      }
      query_starts_[i] = -128 * _mm512_reduce_add_epi32(sum);
    }
  }

 protected:
  static constexpr float kLargest = 127.0f * 128.0f;

  // value = 128 * high + low, both of one byte
  static __m512i high_of(__m512i value) {
    return _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(64)), 7);
  }
  static __m512i low_of(__m512i value, __m512i high) {
    return _mm512_sub_epi32(value, _mm512_slli_epi32(high, 7));
  }
  // Writes a group of four values, `size` numbers apart, as vectors of 16 depths, `step` bytes apart.
  static void interleave(const int8_t* from, int64_t size, int8_t* to, int64_t step) {
    __m512i key[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) key[k] = _mm512_loadu_si512(from + k * size);
    const __m512i low01 = _mm512_unpacklo_epi8(key[0], key[1]), high01 = _mm512_unpackhi_epi8(key[0], key[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(key[2], key[3]), high23 = _mm512_unpackhi_epi8(key[2], key[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(low01, low23));
    _mm512_store_si512(to + step, _mm512_unpackhi_epi16(low01, low23));
    _mm512_store_si512(to + 2 * step, _mm512_unpacklo_epi16(high01, high23));
    _mm512_store_si512(to + 3 * step, _mm512_unpackhi_epi16(high01, high23));
  }
  // Puts the 64 depths of such vectors in order: vector j has 16 l + 4 j … 16 l + 4 j + 3 in its lanes 4 l … 4
  // l + 3.
  static void put_in_order(VecF (&v)[4]) {
    const VecF first01 = _mm512_shuffle_f32x4(v[0], v[1], 0x44),
               last01 = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
    const VecF first23 = _mm512_shuffle_f32x4(v[2], v[3], 0x44),
               last23 = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_f32x4(first01, first23, 0x88);
    v[1] = _mm512_shuffle_f32x4(first01, first23, 0xdd);
    v[2] = _mm512_shuffle_f32x4(last01, last23, 0x88);
    v[3] = _mm512_shuffle_f32x4(last01, last23, 0xdd);
  }
  // Four bytes to every 64th place.
  static void store_quads(int8_t* to, __m128i bytes) {
    alignas(16) int32_t quads[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(quads), bytes);
    for (int q = 0; q < 4; ++q) __builtin_memcpy(to + 64 * q, quads + q, sizeof quads[q]);
  }

  int8_t* const query_bytes_;  // [D / 4, high and low bytes of 8 rows, 4]
  float query_steps_[kMaxDepthRows];
  alignas(64) float weight_steps_[kLanes];
  int32_t query_starts_[kMaxDepthRows];                        // -128 times the sum of the integers
  alignas(64) int8_t weights_[2 * kMaxDepthRows * kTileKeys];  // [high and low bytes of 8 rows, keys]
};

}  // namespace
}  // namespace ascend_vllm

#endif
