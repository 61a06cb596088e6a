// Transposing 16 rows of 4 bytes, for every AVX-512 set.
#pragma once

#ifdef __AVX512F__

#include "cpu/kernels/paged_softmax.h"

namespace ascend_vllm {
namespace {

// Lane j of four: 16 bytes at row(first + j * step). Inserting loads do not use the shuffle port.
template <class RowAt>
[[gnu::always_inline]] inline __m512i gather_quads(const RowAt& row, int first, int step) {
  const auto quad = [&](int k) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row(k))); };
  __m512i quads = _mm512_castsi128_si512(quad(first));
  quads = _mm512_inserti32x4(quads, quad(first + step), 1);
  quads = _mm512_inserti32x4(quads, quad(first + 2 * step), 2);
  return _mm512_inserti32x4(quads, quad(first + 3 * step), 3);
}

// Gives store(i, vector of element i of 16 rows) for the 4 elements of 4 bytes at row(k).
template <class RowAt, class Store>
[[gnu::always_inline]] inline void transpose_singles(const RowAt& row, const Store& store_row) {
  __m512i rows[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) rows[k] = gather_quads(row, k, 4);
  const __m512i low0 = _mm512_unpacklo_epi32(rows[0], rows[1]), low1 = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i high0 = _mm512_unpackhi_epi32(rows[0], rows[1]),
                high1 = _mm512_unpackhi_epi32(rows[2], rows[3]);
  store_row(0, _mm512_unpacklo_epi64(low0, low1));
  store_row(1, _mm512_unpackhi_epi64(low0, low1));
  store_row(2, _mm512_unpacklo_epi64(high0, high1));
  store_row(3, _mm512_unpackhi_epi64(high0, high1));
}

}  // namespace
}  // namespace ascend_vllm

#endif
