// The form of latent_lanes.h for bfloat16 with AMX tiles.
//
//     scores[32 keys, lanes]  = keys[32, D]           . queries[D / 2, lanes, 2]
//     out[16 rows, 16 depths] += weights[16 rows, keys] . values[keys / 2, 16 depths, 2]
//
// Keys are tiles where the cache has them. Values are interleaved in pairs of keys, 32 depths at a time, for
// all panels of rows: within 16 bytes of the cache's rows, which is a single instruction for 32 numbers and
// puts depths 0 … 3, 8 … 11, … into one tile and 4 … 7, 12 … 15, … into the next one; they are sorted when
// results are written. Softmax as in paged_query_tiles.h.
//
// A query row is a column of scores and a row of `out`, so its result does not depend on the other rows.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/kernels/latent_lanes.h"
#include "cpu/kernels/paged_tiles.h"

namespace ascend_vllm {
namespace {

class LatentTiles {
  static constexpr int64_t kDepths = LanesPart::kDepths;
  static constexpr int64_t kTile = kTileHeight * kTileHeight;  // floats of a tile of `out`

 public:
  static constexpr int64_t kMostRows = 128;

  static constexpr int64_t scratch_floats(int64_t key_width) {
    return kTileKeys * (kPanelLanes + kMostRows / 2 + kDepths / 2) +
           (kMostRows + kTileKeys) * round_up(key_width, kStepDepths) / 2;
  }

  // scale: greater than 0.
  LatentTiles(const AttendedRows<bfloat16>& attended, const QueryRows& rows, float scale, float* scratch)
      : attended_(attended),
        rows_(rows),
        scale_(scale),
        depths_(round_up(attended.key_width, kStepDepths)),
        width_(round_up(attended.value_width, kDepths)) {
    const auto take = [&scratch](int64_t floats) {
      float* taken = scratch;
      scratch += floats;
      return taken;
    };
    const auto take_halves = [&take](int64_t count) { return reinterpret_cast<bfloat16*>(take(count / 2)); };
    scores_ = take(kTileKeys * kPanelLanes);
    weights_ = take_halves(kTileKeys * kMostRows);
    values_ = take_halves(kTileKeys * kDepths);
    queries_ = take_halves(kMostRows * depths_);
    keys_ = take_halves(kTileKeys * depths_);
  }

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    for_panels(rows_.count(), [&](int64_t first, auto vecs) {
      constexpr int kVecs = decltype(vecs)::value;
      constexpr int64_t kRow = 2 * kVecs * kLanes;
      for (int v = 0; v < kVecs; ++v) {
        const auto row = [&](int lane) {
          return query(rows_.begin + min_of(first + v * kLanes + lane, rows_.count() - 1));
        };
        bfloat16* to = queries_ + first * depths_ + 2 * v * kLanes;
        int64_t d = 0;
        for (; d < attended_.key_width; d += 8, to += 4 * kRow) {
          transpose_singles([&](int lane) { return row(lane) + d; },
                            [&](int i, __m512i pairs) { _mm512_store_si512(to + i * kRow, pairs); });
        }
        for (; d < depths_; d += 2, to += kRow) _mm512_store_si512(to, _mm512_setzero_si512());
      }
    });
  }

  // As LatentLanes::attend.
  void attend(int64_t key_begin, int64_t key_end, LanesPart part) {
    const int64_t lanes = round_up(rows_.count(), kLanes);
    fill(part.max, lanes, kNoMax);
    fill(part.sum, lanes, 0.0f);
    fill(part.out, lanes * width_, 0.0f);
    const Tiles tiles;
    for (int64_t tile = key_begin; tile < key_end; tile += kTileKeys) {
      const int64_t end = min_of(key_end - tile, kTileKeys);
      const auto for_seen = [&](const auto& body) {
        for_panels(rows_.count(), [&](int64_t first, auto vecs) {
          const int64_t high = seen_keys(rows_, first, decltype(vecs)::value * kLanes, tile, 0, end).high;
          if (high > 0) body(first, high, vecs);
        });
      };
      const KeyTiles keys = tile_keys(tile, end);
      for_seen([&](int64_t first, int64_t high, auto vecs) {
        score_panel<decltype(vecs)::value>(first, tile, high, keys, tile > key_begin, part);
      });
      for (int64_t depth = 0; depth < width_; depth += kDepths) {
        interleave_values(tile, end, depth);
        fetch(tile + kTileKeys, depth, key_end);
        finish_writes();
        for_seen([&](int64_t first, int64_t high, auto vecs) {
          add_panel<decltype(vecs)::value>(first, high, part.out + first * width_ + depth * kTileHeight);
        });
      }
    }
  }

  // total += part
  void merge(LanesPart total, LanesPart part) const {
    for (int64_t first = 0; first < rows_.count(); first += kLanes) {
      const VecF before = load(total.max + first), other = load(part.max + first),
                 greatest = max(before, other);
      const VecF factor = exp2_negative(before - greatest), other_factor = exp2_negative(other - greatest);
      store(total.max + first, greatest);
      store(total.sum + first, load(total.sum + first) * factor + load(part.sum + first) * other_factor);
      alignas(64) float factors[kLanes], other_factors[kLanes];
      store(factors, factor);
      store(other_factors, other_factor);
      for_out_rows(total.out, first, [&](float* row, int r) {
        const VecF added = load(part.out + (row - total.out)) * set1(other_factors[r]);
        store(row, load(row) * set1(factors[r]) + added);
      });
    }
  }

  // As LatentLanes::write.
  template <class RowOf>
  void write(LanesPart total, const RowOf& out) const {
    alignas(64) static constexpr int kLow[16] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    alignas(64) static constexpr int kHigh[16] = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    for (int64_t row = 0; row < rows_.count(); ++row) {
      const VecF factor = set1(1.0f / total.sum[row]);
      const float* from = total.out + round_down(row, kLanes) * width_ + row % kLanes * kTileHeight;
      bfloat16* to = out(rows_.begin + row);
      for (int64_t depth = 0; depth < attended_.value_width; depth += kDepths, from += 2 * kTile) {
        const VecF first = load(from) * factor, second = load(from + kTile) * factor;
        const VecF low = _mm512_permutex2var_ps(first, _mm512_load_si512(kLow), second);
        const VecF high = _mm512_permutex2var_ps(first, _mm512_load_si512(kHigh), second);
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_mask_storeu_epi16(to + depth, lanes_of(depth), both);
      }
    }
  }

 private:
  // As an exponent of two.
  static constexpr float kSlack = 8.0f;

  // The keys of a tile, 16 after another.
  struct KeyTiles {
    const bfloat16* tiles[kTileKeys / kTileHeight];
    int64_t row_bytes;
  };

  // Of 32 depths, those that values have.
  __mmask32 lanes_of(int64_t depth) const {
    return static_cast<__mmask32>((uint64_t{1} << min_of(attended_.value_width - depth, kDepths)) - 1);
  }

  // In place, or copied and padded with zeros. Tiles behind those in use are replaced by another one: their
  // scores are masked.
  KeyTiles tile_keys(int64_t tile, int64_t end) {
    const int64_t size = attended_.key_width;
    KeyTiles keys{{}, static_cast<int64_t>(depths_ * sizeof(bfloat16))};
    for (int64_t n = 0; n < kTileKeys; n += kTileHeight) {
      const bfloat16*& to = keys.tiles[n / kTileHeight];
      if (n >= end) {
        to = keys.tiles[0];
      } else if (size == depths_) {
        to = attended_.key(tile + n);
      } else {
        to = keys_ + n * depths_;
        for (int64_t i = 0; i < min_of(kTileHeight, end - n); ++i) {
          bfloat16* row = keys_ + (n + i) * depths_;
          __builtin_memcpy(row, attended_.key(tile + n + i), size * sizeof(bfloat16));
          __builtin_memset(row + size, 0, (depths_ - size) * sizeof(bfloat16));
        }
      }
    }
    return keys;
  }

  // Values of the tile as [2, kTileKeys / 2, 16, 2] from `depth` on, see above. Memory beyond the keys in use
  // may contain NaN, which a weight of zero would not mask, so it is replaced by zeros.
  void interleave_values(int64_t tile, int64_t end, int64_t depth) {
    const __mmask32 lanes = lanes_of(depth);
    const auto value = [&](int64_t n) {
      return n < end ? _mm512_maskz_loadu_epi16(lanes, attended_.value(tile + n) + depth)
                     : _mm512_setzero_si512();
    };
    bfloat16* to = values_;
    for (int64_t n = 0; n < round_up(end, kStepKeys); n += 2, to += kDepths) {
      const __m512i first = value(n), second = value(n + 1);
      _mm512_store_si512(to, _mm512_unpacklo_epi16(first, second));
      _mm512_store_si512(to + kTileKeys / 2 * kDepths, _mm512_unpackhi_epi16(first, second));
    }
  }

  // Prefetches a share of a tile's keys into the L2 cache, since blocks are scattered; all depths do it all.
  void fetch(int64_t tile, int64_t depth, int64_t key_end) const {
    const int64_t count = min_of(key_end - tile, kTileKeys);
    for (int64_t n = kTileKeys * depth / width_; n < min_of(kTileKeys * (depth + kDepths) / width_, count);
         ++n) {
      const bfloat16* from = attended_.key(tile + n);
      for (int64_t i = 0; i < attended_.key_width; i += kDepths) __builtin_prefetch(from + i, 0, 2);
    }
  }

  // Makes the weights of keys 0 … high-1 of the tile for the panel whose first row is `first`.
  template <int kVecs>
  void score_panel(int64_t first, int64_t tile, int64_t high, const KeyTiles& keys, bool has_sums,
                   LanesPart part) {
    constexpr int kWidth = kVecs * kLanes;
    finish_writes();
    for (int64_t n = 0; n < high; n += kStepKeys) {
      const bfloat16* const* both = keys.tiles + n / kTileHeight;
      score_step<kVecs>(both[0], both[1], keys.row_bytes, queries_ + first * depths_, depths_,
                        scores_ + n * kWidth);
    }
    hide<kWidth>(rows_, first, tile, 0, high, scores_);
    // keys are weighted 32 at a time; those that are missing get the weight 0
    fill(scores_ + high * kWidth, (round_up(high, kStepKeys) - high) * kWidth, -__builtin_inff());
    for (int v = 0; v < kVecs; ++v) {
      weigh(first + v * kLanes, high, scores_ + v * kLanes, kWidth, has_sums, part);
    }
  }

  // Turns the scores of 16 rows into weights [steps of 32 keys, 16 rows, 32 keys]; rescales their sums if
  // needed.
  void weigh(int64_t first, int64_t high, const float* scores, int64_t stride, bool has_sums, LanesPart part) {
    const VecF scale = set1(scale_), before = load(part.max + first);
    VecF greatest = load(scores);
    for (int64_t n = 1; n < high; ++n) greatest = max(greatest, load(scores + n * stride));
    greatest = greatest * scale;
    const Mask grows = gt(greatest, before + set1(kSlack));
    greatest = select(grows, greatest, before);
    const VecF factor = exp2_negative(before - greatest);  // 1 for unchanged rows
    store(part.max + first, greatest);
    VecF sum = load(part.sum + first) * factor;
    if (has_sums && bits(grows) != 0) {
      alignas(64) float factors[kLanes];
      store(factors, factor);
      for_out_rows(part.out, first, [&](float* row, int r) { store(row, load(row) * set1(factors[r])); });
    }
    bfloat16* weights = weights_ + first * kTileKeys;
    for (int64_t n = 0; n < high; n += kStepKeys, weights += kTileHeight * kStepKeys) {
      alignas(64) bfloat16 pairs[kStepKeys * kLanes];
      for (int64_t k = 0; k < kStepKeys; k += 2) {
        const auto weight_of = [&](int64_t key) {
          return exp2_coarse(_mm512_fmsub_ps(load(scores + (n + key) * stride), scale, greatest));
        };
        const VecF weight = weight_of(k), next = weight_of(k + 1);
        store_interleaved(pairs + k * kLanes, weight, next);
        sum = sum + (weight + next);
      }
      for (int quad = 0; quad < kLanes; quad += 4) {
        transpose_singles(
            [&](int pair) { return pairs + 2 * (pair * kLanes + quad); },
            [&](int i, __m512i row) { _mm512_store_si512(weights + (quad + i) * kStepKeys, row); });
      }
    }
    store(part.sum + first, sum);
  }

  // out += weights . values for the panel whose first row is `first`, 32 depths.
  template <int kVecs>
  void add_panel(int64_t first, int64_t high, float* out) const {
    const bfloat16* weights = weights_ + first * kTileKeys;
    float* second = out + kTileHeight * width_;
    _tile_loadd(0, out, kTileRowBytes);
    _tile_loadd(1, out + kTile, kTileRowBytes);
    if constexpr (kVecs == 2) {
      _tile_loadd(2, second, kTileRowBytes);
      _tile_loadd(3, second + kTile, kTileRowBytes);
    }
    for (int64_t n = 0; n < high; n += kStepKeys) {
      const bfloat16* values = values_ + n / 2 * kDepths;
      _tile_loadd(4, weights + n * kTileHeight, kTileRowBytes);
      _tile_loadd(6, values, kTileRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + kTileKeys / 2 * kDepths, kTileRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kVecs == 2) {
        _tile_loadd(5, weights + (kTileKeys + n) * kTileHeight, kTileRowBytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, kTileRowBytes);
    _tile_stored(1, out + kTile, kTileRowBytes);
    if constexpr (kVecs == 2) {
      _tile_stored(2, second, kTileRowBytes);
      _tile_stored(3, second + kTile, kTileRowBytes);
    }
  }

  // Calls body(16 sums, row % 16) for all sums of the 16 rows from `first` on.
  template <class Body>
  [[gnu::always_inline]] void for_out_rows(float* out, int64_t first, const Body& body) const {
    float* at = out + first * width_;
    for (int64_t depth = 0; depth < width_; depth += kTileHeight) {
      for (int r = 0; r < kLanes; ++r, at += kTileHeight) body(at, r);
    }
  }

  const AttendedRows<bfloat16>& attended_;
  const QueryRows& rows_;
  const float scale_;
  const int64_t depths_, width_;  // the padded widths of keys and of values
  float* scores_;                 // [kTileKeys, panel lanes], not scaled
  bfloat16* weights_;             // of 16 rows after another, see weigh()
  bfloat16* values_;              // see interleave_values()
  bfloat16* queries_;             // panels of [depths / 2, panel lanes, 2]
  bfloat16* keys_;                // [kTileKeys, depths]
};

template <>
struct LatentFormOf<bfloat16> {
  using type = LatentTiles;
};

}  // namespace
}  // namespace ascend_vllm

#endif
