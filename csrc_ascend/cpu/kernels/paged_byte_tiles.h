// Attention of few query rows to an int8 cache with AMX tiles of bytes, which read keys in place.
//
//     scores[16 keys, 16]     = keys[16, D]       . queries[D / 4, 16, 4]
//     out[16, 16 depths]     += weights[16, keys] . values[keys / 4, 16 depths, 4]
//
// A row is two of the 16 lanes, of high and of low bytes. Every row has lanes of its own, so its result does
// not depend on the other rows.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/isa/tiles.h"
#include "cpu/kernels/paged_byte_rows.h"

namespace ascend_vllm {
namespace {

class ByteTiles : public ByteRows {
  static constexpr int64_t kTileBytes = 1024;

 public:
  using ByteRows::ByteRows;

  // Attends to positions key_begin … key_end-1 that are visible to each row.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    fill(part.out, rows_.count() * blocks_.head_size, 0.0f);
    fill(part.max, rows_.count(), kNoMax);
    fill(part.sum, rows_.count(), 0.0f);
    __builtin_memset(weights_, 0, sizeof weights_);
    const Tiles tiles;
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      score(tile, begin, end, key_end);
      load_scales(tile, begin, end);
      for (int64_t i = 0; i < rows_.count(); ++i) {
        rescale_[i] = weigh(i, tile, begin, end, part);
        round_weights(i, begin, end);
      }
      for (int64_t d = 0; d < blocks_.head_size; d += kDepths) add_values(tile, begin, end, d, part.out + d);
    }
  }

 private:
  void score(int64_t tile, int64_t begin, int64_t end, int64_t key_end) {
    const int64_t size = blocks_.head_size;
    for (int64_t n = round_down(begin, kTileHeight); n < end; n += kTileHeight) {
      if (tile + kTileKeys + n < key_end) {
        blocks_.prefetch(blocks_.keys, tile + kTileKeys + n, kTileHeight);
        blocks_.prefetch(blocks_.values, tile + kTileKeys + n, kTileHeight);
      }
      const int8_t* keys = blocks_.key(tile + n);
      finish_writes();
      _tile_zero(0);
      for (int64_t d = 0; d < size; d += kDepths) {
        _tile_loadd(4, keys + d, size);
        _tile_loadd(5, query_bytes_ + d * 16, kTileRowBytes);
        _tile_dpbssd(0, 4, 5);
      }
      _tile_stored(0, sums_, kTileRowBytes);
      finish_writes();
      store_scores(n);
    }
  }

  // Scores of 16 keys from `sums_`, [16 keys, high and low lanes of 8 rows].
  void store_scores(int64_t n) {
    // halves of 256 bits: 8 rows of a key, 8 keys apart
    __m512i keys[8], pairs[8], fours[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const __m512i first = _mm512_load_si512(sums_ + 16 * k), second = _mm512_load_si512(sums_ + 16 * (k + 8));
      const __m512i high = _mm512_shuffle_i64x2(first, second, 0x44);
      keys[k] = _mm512_add_epi32(_mm512_slli_epi32(high, 7), _mm512_shuffle_i64x2(first, second, 0xee));
    }
#pragma GCC unroll 4
    for (int k = 0; k < 8; k += 2) {
      pairs[k] = _mm512_unpacklo_epi32(keys[k], keys[k + 1]);
      pairs[k + 1] = _mm512_unpackhi_epi32(keys[k], keys[k + 1]);
    }
#pragma GCC unroll 2
    for (int k = 0; k < 8; k += 4) {
      fours[k] = _mm512_unpacklo_epi64(pairs[k], pairs[k + 2]);
      fours[k + 1] = _mm512_unpackhi_epi64(pairs[k], pairs[k + 2]);
      fours[k + 2] = _mm512_unpacklo_epi64(pairs[k + 1], pairs[k + 3]);
      fours[k + 3] = _mm512_unpackhi_epi64(pairs[k + 1], pairs[k + 3]);
    }
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const __m512i sums = _mm512_permutex2var_epi64(fours[i % 4], i < 4 ? even : odd, fours[4 + i % 4]);
      store(scores_ + i * kTileKeys + n, _mm512_cvtepi32_ps(sums) * set1(query_steps_[i] * scale_));
    }
  }

  // Sets the step of a row's weights of keys first … last-1, whole vectors, so that the largest is kLargest of
  // them. Returns what turns weights into steps.
  float set_step(int64_t i, int64_t first, int64_t last) {
    const float* weights = scores_ + i * kTileKeys;
    VecF greatest = set1(0.0f);
    for (int64_t n = first; n < last; n += kLanes) greatest = max(greatest, load(weights + n));
    const float largest = reduce_max(greatest);
    // below, 1 / largest is infinite, and so little does not count
    const bool counts = largest > 1e-30f;
    weight_steps_[i] = counts ? largest / kLargest : 0.0f;
    return counts ? kLargest / largest : 0.0f;
  }

  // Rounds the weights of a row; those of keys that are not in begin … end-1 are zero.
  void round_weights(int64_t i, int64_t begin, int64_t end) {
    const int64_t first = round_down(begin, kLanes), last = round_up(end, kLanes);
    const float* weights = scores_ + i * kTileKeys;
    const VecF factor = set1(set_step(i, first, last));
    for (int64_t n = 0; n < kTileKeys; n += kLanes) {
      const bool is_used = n >= first && n < last;
      const __m512i value = is_used ? _mm512_cvtps_epi32(load(weights + n) * factor) : _mm512_setzero_si512();
      const __m512i high = high_of(value), low = low_of(value, high);
      int8_t* to = weights_ + i * kTileKeys + n;
      _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(high));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + kMaxDepthRows * kTileKeys), _mm512_cvtepi32_epi8(low));
    }
  }

  // Groups of four keys as [16 groups, 16 depths, 4], for depths d … d+63; see `put_in_order`.
  // Other groups keep finite numbers, whose weights are zero.
  void interleave_values(int64_t tile, int64_t begin, int64_t end, int64_t d) {
    const int64_t size = blocks_.head_size;
    for (int64_t n = round_down(begin, 4); n < end; n += 4) {
      interleave(blocks_.value(tile + n) + d, size, values_ + n / 4 * kTileRowBytes, kTileBytes);
    }
  }

  // out[row, 64 depths from d] = out * rescale + weights * values.
  void add_values(int64_t tile, int64_t begin, int64_t end, int64_t d, float* out) {
    interleave_values(tile, begin, end, d);
    finish_writes();
    _tile_loadd(4, weights_, kTileKeys);
    // registers are named by numerals
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, values_, kTileRowBytes);
    _tile_dpbssd(0, 4, 5);
    _tile_loadd(6, values_ + kTileBytes, kTileRowBytes);
    _tile_dpbssd(1, 4, 6);
    _tile_loadd(5, values_ + 2 * kTileBytes, kTileRowBytes);
    _tile_dpbssd(2, 4, 5);
    _tile_loadd(6, values_ + 3 * kTileBytes, kTileRowBytes);
    _tile_dpbssd(3, 4, 6);
    _tile_stored(0, sums_, kTileRowBytes);
    _tile_stored(1, sums_ + 256, kTileRowBytes);
    _tile_stored(2, sums_ + 2 * 256, kTileRowBytes);
    _tile_stored(3, sums_ + 3 * 256, kTileRowBytes);
    finish_writes();
    for (int64_t i = 0; i < rows_.count(); ++i) {
      VecF v[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int32_t* high = sums_ + j * 256 + i * 16;
        const __m512i low = _mm512_load_si512(high + kMaxDepthRows * 16);
        v[j] = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 7), low));
      }
      put_in_order(v);
      const VecF factor = set1(rescale_[i]), step = set1(weight_steps_[i]);
      float* to = out + i * blocks_.head_size;
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) store(to + 16 * l, fma(v[l], step, load(to + 16 * l) * factor));
    }
  }

  alignas(64) int8_t values_[4 * kTileBytes];
  alignas(64) int32_t sums_[4 * 256];
};

}  // namespace
}  // namespace ascend_vllm

#endif
