// Attention of up to eight bfloat16 query rows with AMX tiles, for decoding: keys are read in place, and pairs
// of values are interleaved, so that nothing but the weights is transposed.
//
//     scores[16 keys, 8 rows]   = keys[16, D]       . queries[D / 2, 8 rows, 2]
//     out[rows, 16 depths]     += weights[rows, 32] . values[16 pairs of keys, 16 depths, 2]
//
// The softmax is that of paged_query_tiles.h. Every row has lanes of its own, so its result does not depend on
// the other rows.
#pragma once

#ifdef __AMX_BF16__

#include <initializer_list>

#include "cpu/kernels/paged_fetch.h"
#include "cpu/kernels/paged_tiles.h"

namespace ascend_vllm {
namespace {

class RowTiles {
 public:
  static constexpr int64_t kMostRows = 8;

  // Whether this is for `rows` rows of a sequence: a single one was measured slower than with vectors.
  static bool takes(int64_t rows, int64_t head_size) {
    return rows > 1 && rows <= kMostRows && head_size % kStepDepths == 0;
  }
  static constexpr int64_t scratch_floats(int64_t head_size) {
    return kTileKeys * kMostRows * 3 / 2 + (kTileKeys / 2 + kMostRows / 2 + kMostRows) * head_size;
  }

  // scale: greater than 0. fetch: of the tiles that follow each tile.
  RowTiles(const HeadBlocks<bfloat16>& blocks, const QueryRows& rows, float scale, float* scratch,
           const TileFetch<bfloat16>& fetch)
      : blocks_(blocks), rows_(rows), scale_(scale), fetch_(fetch) {
    const int64_t size = blocks.head_size;
    scores_ = scratch;
    weights_ = reinterpret_cast<bfloat16*>(scores_ + kTileKeys * kMostRows);
    values_ = weights_ + kMostRows * kTileKeys;
    queries_ = values_ + kTileKeys * size;
    out_ = reinterpret_cast<float*>(queries_ + kMostRows * size);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t row = lane % kMostRows, used = rows.begin + (row < rows.count() ? row : 0);
      seen_from_[lane] = static_cast<int32_t>(rows.seen_from(used));
      seen_to_[lane] = static_cast<int32_t>(rows.position(used));
    }
  }

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    const int64_t size = blocks_.head_size;
    __builtin_memset(queries_, 0, kMostRows * size * sizeof(bfloat16));
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const bfloat16* from = query(rows_.begin + i);
      for (int64_t d = 0; d < size; d += 2) {
        __builtin_memcpy(queries_ + d * kMostRows + 2 * i, from + d, 2 * sizeof(bfloat16));
      }
    }
  }

  // Attends to positions key_begin … key_end-1 that are visible to each row.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    max_ = set1(kNoMax);
    sum_ = set1(0.0f);
    fill(out_, kMostRows * blocks_.head_size, 0.0f);
    const Tiles tiles(shapes());
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      fetch_.start_after(tile);
      score(tile, begin, end);
      interleave_values(tile, begin, end);
      if (begin > 0 || end < kTileKeys || hides(tile)) hide(tile, begin, end);
      weigh(begin, end);
      finish_writes();
      for (int64_t d = 0; d < blocks_.head_size; d += kStepDepths) add_values(d, begin, end);
      finish_writes();
      fetch_.rest();
    }
    write(part);
  }

 private:
  // As an exponent of two; see paged_query_tiles.h.
  static constexpr float kSlack = 8.0f;
  static constexpr int64_t kScoreBytes = kMostRows * sizeof(float);  // of a key
  alignas(64) static constexpr bfloat16 kZeros[256] = {};

  // Tiles 0 and 1 are sums, 2 weights, 3 and 4 values; 5 is scores, 6 keys, 7 queries.
  TileShapes shapes() const {
    TileShapes shapes;
    for (const int tile : {0, 1, 2}) shapes.rows[tile] = static_cast<uint8_t>(rows_.count());
    for (const int tile : {5, 7}) shapes.row_bytes[tile] = kScoreBytes;
    return shapes;
  }

  // Scores of the steps of 32 keys that have keys begin … end-1.
  void score(int64_t tile, int64_t begin, int64_t end) {
    const int64_t size = blocks_.head_size, row_bytes = size * static_cast<int64_t>(sizeof(bfloat16));
    for (int64_t n = round_down(begin, kStepKeys); n < round_up(end, kStepKeys); n += kTileHeight) {
      float* to = scores_ + n * kMostRows;
      if (n + kTileHeight <= begin || n >= end) {
        fill(to, kTileHeight * kMostRows, -__builtin_inff());
        continue;
      }
      const bfloat16* keys = blocks_.key(tile + n);
      _tile_zero(5);
      for (int64_t d = 0; d < size; d += kStepDepths) {
        _tile_loadd(6, keys + d, row_bytes);
        _tile_loadd(7, queries_ + d * kMostRows, kScoreBytes);
        _tile_dpbf16ps(5, 6, 7);
        fetch_.some(kTileKeys / 8);
      }
      _tile_stored(5, to, kScoreBytes);
    }
    finish_writes();
  }

  // Whether some key of the tile is hidden from some row.
  bool hides(int64_t tile) const {
    return tile < rows_.seen_from(rows_.end - 1) || tile + kTileKeys - 1 > rows_.position(rows_.begin);
  }

  // Masks the scores of keys that are not visible to a row, or not among begin … end-1.
  void hide(int64_t tile, int64_t begin, int64_t end) {
    const __m512i from =
        _mm512_max_epi32(_mm512_load_si512(seen_from_), _mm512_set1_epi32(static_cast<int>(tile + begin)));
    const __m512i to =
        _mm512_min_epi32(_mm512_load_si512(seen_to_), _mm512_set1_epi32(static_cast<int>(tile + end - 1)));
    const __m512i second = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    for (int64_t n = round_down(begin, kStepKeys); n < round_up(end, kStepKeys); n += 2) {
      const __m512i key = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(tile + n)), second);
      const __mmask16 seen = _mm512_cmpge_epi32_mask(key, from) & _mm512_cmple_epi32_mask(key, to);
      float* at = scores_ + n * kMostRows;
      store(at, _mm512_mask_blend_ps(seen, set1(-__builtin_inff()), load(at)));
    }
  }

  // Pairs of values as [16 pairs, 16 depths, 2], tile by tile of a step of 32 keys; see `write` for the order
  // of depths. Memory beyond the keys in use may contain NaN, which a weight of zero would not mask, so it is
  // zeroed.
  void interleave_values(int64_t tile, int64_t begin, int64_t end) {
    const int64_t size = blocks_.head_size;
    for (int64_t n = round_down(begin, kStepKeys); n < round_up(end, kStepKeys); n += 2) {
      const auto at = [&](int64_t k) { return k >= begin && k < end ? blocks_.value(tile + k) : kZeros; };
      const bfloat16 *first = at(n), *second = at(n + 1);
      bfloat16* to = values_ + n / kStepKeys * kStepKeys * size + n % kStepKeys * kLanes;
      for (int64_t d = 0; d < size; d += kStepDepths, to += 2 * kTileHeight * 2 * kLanes) {
        const __m512i a = _mm512_loadu_si512(first + d), b = _mm512_loadu_si512(second + d);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + kTileHeight * 2 * kLanes, _mm512_unpackhi_epi16(a, b));
        fetch_.some(2);
      }
    }
  }

  // Turns scores into weights, and rescales the sums if needed.
  void weigh(int64_t begin, int64_t end) {
    const int64_t first = round_down(begin, kStepKeys), last = round_up(end, kStepKeys);
    // four at a time, since a maximum has a latency of four cycles
    VecF chains[4];
    for (VecF& chain : chains) chain = set1(-__builtin_inff());
    for (int64_t n = first; n < last; n += 8) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) chains[k] = max(chains[k], load(scores_ + (n + 2 * k) * kMostRows));
    }
    VecF greatest = max(max(chains[0], chains[1]), max(chains[2], chains[3]));
    const VecF scale = set1(scale_);
    greatest = max(greatest, _mm512_shuffle_f32x4(greatest, greatest, 0x4e)) * scale;
    const Mask grows = gt(greatest, max_ + set1(kSlack));
    if (bits(grows) != 0) rescale(select(grows, greatest, max_));
    for (int64_t n = first; n < last; n += kStepKeys) {
      // quads[i]: keys 4 i … 4 i + 3 of each row
      __m512i quads[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const float* scores = scores_ + (n + 4 * i) * kMostRows;
        const VecF weight = exp2_coarse(_mm512_fmsub_ps(load(scores), scale, max_));
        const VecF next = exp2_coarse(_mm512_fmsub_ps(load(scores + kLanes), scale, max_));
        sum_ = sum_ + (weight + next);
        quads[i] = rows_of_keys(reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(next, weight)));
        fetch_.some(4);
      }
      store_weights(quads, weights_ + n);
    }
  }

  // [4 keys, 8 rows] → [8 rows, 4 keys]
  static __m512i rows_of_keys(__m512i keys) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0,  8,  16, 24, 1,  9,  17, 25, 2,  10, 18,
                                                        26, 3,  11, 19, 27, 4,  12, 20, 28, 5,  13,
                                                        21, 29, 6,  14, 22, 30, 7,  15, 23, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), keys);
  }

  // Writes the weights of 32 keys to rows of kTileKeys.
  static void store_weights(const __m512i (&quads)[8], bfloat16* to) {
    // even[j], odd[j]: quads 2 j and 2 j + 1 of the even and of the odd rows
    __m512i even[4], odd[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      even[j] = _mm512_unpacklo_epi64(quads[2 * j], quads[2 * j + 1]);
      odd[j] = _mm512_unpackhi_epi64(quads[2 * j], quads[2 * j + 1]);
    }
    const auto store_rows = [to](const __m512i(&of)[4], int row) {
      const __m512i low01 = _mm512_shuffle_i64x2(of[0], of[1], 0x44),
                    low23 = _mm512_shuffle_i64x2(of[2], of[3], 0x44);
      const __m512i high01 = _mm512_shuffle_i64x2(of[0], of[1], 0xee),
                    high23 = _mm512_shuffle_i64x2(of[2], of[3], 0xee);
      _mm512_store_si512(to + row * kTileKeys, _mm512_shuffle_i64x2(low01, low23, 0x88));
      _mm512_store_si512(to + (row + 2) * kTileKeys, _mm512_shuffle_i64x2(low01, low23, 0xdd));
      _mm512_store_si512(to + (row + 4) * kTileKeys, _mm512_shuffle_i64x2(high01, high23, 0x88));
      _mm512_store_si512(to + (row + 6) * kTileKeys, _mm512_shuffle_i64x2(high01, high23, 0xdd));
    };
    store_rows(even, 0);
    store_rows(odd, 1);
  }

  void rescale(VecF new_max) {
    const VecF factor = exp2_negative(max_ - new_max);  // 1 for unchanged rows
    max_ = new_max;
    sum_ = sum_ * factor;
    float factors[kLanes];
    store(factors, factor);
    for (int64_t j = 0; j < blocks_.head_size / kLanes; ++j) {
      for (int64_t i = 0; i < rows_.count(); ++i) {
        float* at = out_ + (j * kMostRows + i) * kLanes;
        store(at, load(at) * set1(factors[i]));
      }
    }
  }

  // Adds to two tiles of sums, of the depths d … d+31.
  void add_values(int64_t d, int64_t begin, int64_t end) {
    constexpr int64_t kTile = 2 * kTileHeight * kLanes;
    float *first = out_ + d * kMostRows, *second = first + kMostRows * kLanes;
    _tile_loadd(0, first, kTileRowBytes);
    _tile_loadd(1, second, kTileRowBytes);
    for (int64_t n = round_down(begin, kStepKeys); n < round_up(end, kStepKeys); n += kStepKeys) {
      const bfloat16* values = values_ + n * blocks_.head_size + d / kLanes * kTile;
      _tile_loadd(2, weights_ + n, kTileKeys * sizeof(bfloat16));
      _tile_loadd(3, values, kTileRowBytes);
      _tile_dpbf16ps(0, 2, 3);
      _tile_loadd(4, values + kTile, kTileRowBytes);
      _tile_dpbf16ps(1, 2, 4);
    }
    _tile_stored(0, first, kTileRowBytes);
    _tile_stored(1, second, kTileRowBytes);
  }

  // Of two tiles of 32 depths, the first has 8 l … 8 l + 3 in its lanes 4 l … 4 l + 3, the second the others.
  void write(Part part) const {
    const int64_t size = blocks_.head_size;
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const VecF total = sum_ + _mm512_shuffle_f32x4(sum_, sum_, 0x4e);
    for (int64_t i = 0; i < rows_.count(); ++i) {
      for (int64_t d = 0; d < size; d += kStepDepths) {
        const float* from = out_ + d * kMostRows + i * kLanes;
        const __m512i first = _mm512_load_si512(from), second = _mm512_load_si512(from + kMostRows * kLanes);
        float* to = part.out + i * size + d;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(first, low, second));
        _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi64(first, high, second));
      }
    }
    store_n(part.max, max_, static_cast<int>(rows_.count()));
    store_n(part.sum, total, static_cast<int>(rows_.count()));
  }

  const HeadBlocks<bfloat16>& blocks_;
  const QueryRows& rows_;
  const float scale_;
  TileFetch<bfloat16> fetch_;
  VecF max_, sum_;     // lanes i and i + 8 are row i; its sum is that of both
  float* scores_;      // [kTileKeys, 8], not scaled
  bfloat16* weights_;  // [8, kTileKeys]
  bfloat16* values_;   // [kTileKeys / 32, D / 16, 16, 16, 2]
  bfloat16* queries_;  // [D / 2, 8, 2]
  float* out_;         // [D / 16, 8, 16]
  alignas(64) int32_t seen_from_[kLanes];
  alignas(64) int32_t seen_to_[kLanes];
};

}  // namespace
}  // namespace ascend_vllm

#endif
