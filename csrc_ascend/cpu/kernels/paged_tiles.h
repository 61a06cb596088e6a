// The two matrix products of attention with AMX tiles, and the packing of their operands.
//
//     scores[32 keys, lanes]     = keys[32, D]       . queries[D / 2, lanes, 2]
//     out[D, lanes]             += values^T[D, keys] . weights[keys / 2, lanes, 2]
//
// The left operand of a tile product has 16 rows of 32 numbers, which is the cache's layout of keys; values are
// transposed once for all panels of an item. The right one has 16 rows of 16 pairs, which is the panels' layout
// for pairs. Depths are padded to multiples of 32, so all tiles are full.
//
// Every lane is a column of its own, so a row's result does not depend on the other rows.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/isa/tiles.h"
#include "cpu/kernels/paged_panels.h"
#include "cpu/kernels/paged_transpose.h"

namespace ascend_vllm {
namespace {

constexpr int64_t kStepKeys = 32;    // keys of one step of tile products
constexpr int64_t kStepDepths = 32;  // depths

// scores[32, lanes] of twice 16 keys that are `key_bytes` apart. depths: a multiple of 32.
template <int kVecs>
inline void score_step(const bfloat16* first, const bfloat16* second, int64_t key_bytes,
                       const bfloat16* queries, int64_t depths, float* scores) {
  constexpr int64_t kWidth = kVecs * kLanes, kRowBytes = 4 * kWidth;
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (kVecs == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < depths; d += kStepDepths) {
    const bfloat16* query = queries + d * kWidth;
    _tile_loadd(4, first + d, key_bytes);
    _tile_loadd(6, query, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, second + d, key_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kVecs == 2) {
      _tile_loadd(7, query + 2 * kLanes, kRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, scores, kRowBytes);
  _tile_stored(2, scores + kTileHeight * kWidth, kRowBytes);
  if constexpr (kVecs == 2) {
    _tile_stored(1, scores + kLanes, kRowBytes);
    _tile_stored(3, scores + kTileHeight * kWidth + kLanes, kRowBytes);
  }
}

// out[32 depths, lanes] += values[32, keys] * weights[keys / 2, lanes, 2] for `keys` keys, a multiple of 32.
// The values have kTileKeys keys in a row.
template <int kVecs>
inline void add_step(const bfloat16* values, const bfloat16* weights, int64_t keys, float* out) {
  constexpr int64_t kWidth = kVecs * kLanes, kRowBytes = 4 * kWidth, kValueBytes = kTileKeys * sizeof(bfloat16);
  _tile_loadd(0, out, kRowBytes);
  _tile_loadd(2, out + kTileHeight * kWidth, kRowBytes);
  if constexpr (kVecs == 2) {
    _tile_loadd(1, out + kLanes, kRowBytes);
    _tile_loadd(3, out + kTileHeight * kWidth + kLanes, kRowBytes);
  }
  for (int64_t n = 0; n < keys; n += kStepKeys) {
    const bfloat16* weight = weights + n * kWidth;
    _tile_loadd(4, values + n, kValueBytes);
    _tile_loadd(6, weight, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, values + kTileHeight * kTileKeys + n, kValueBytes);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kVecs == 2) {
      _tile_loadd(7, weight + 2 * kLanes, kRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, kRowBytes);
  _tile_stored(2, out + kTileHeight * kWidth, kRowBytes);
  if constexpr (kVecs == 2) {
    _tile_stored(1, out + kLanes, kRowBytes);
    _tile_stored(3, out + kTileHeight * kWidth + kLanes, kRowBytes);
  }
}

// Gives store(i, vector of element i of 32 rows) for the 8 elements of 2 bytes at row(k).
template <class RowAt, class Store>
[[gnu::always_inline]] inline void transpose_halves(const RowAt& row, const Store& store_row) {
  __m512i pairs[8], fours[8];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512i even = gather_quads(row, 2 * k, 8), odd = gather_quads(row, 2 * k + 1, 8);
    pairs[k] = _mm512_unpacklo_epi16(even, odd);
    pairs[4 + k] = _mm512_unpackhi_epi16(even, odd);
  }
  // fours[2 h + s]: elements 2 h and 2 h + 1 of rows 4 s … 4 s + 3 (of eight)
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s) {
      const __m512i first = pairs[4 * half + 2 * s], second = pairs[4 * half + 2 * s + 1];
      fours[4 * half + s] = _mm512_unpacklo_epi32(first, second);
      fours[4 * half + 2 + s] = _mm512_unpackhi_epi32(first, second);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < 4; ++h) {
    store_row(2 * h, _mm512_unpacklo_epi64(fours[2 * h], fours[2 * h + 1]));
    store_row(2 * h + 1, _mm512_unpackhi_epi64(fours[2 * h], fours[2 * h + 1]));
  }
}

// Rounds two vectors and interleaves their lanes.
inline void store_interleaved(bfloat16* p, VecF first, VecF second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
}

}  // namespace
}  // namespace ascend_vllm

#endif
