// Attention of bfloat16 query rows with AMX tiles, and vector lanes along the rows as in paged_query_lanes.h.
// For prompts, and decoding with more rows than paged_row_tiles.h takes.
//
// With tiles the products cost less than the softmax between them, so the softmax is cheaper here too: powers
// of two are only as accurate as bfloat16 weights need, and sums are rescaled only when a row's largest score
// has grown by kSlack. Until then weights may exceed one, which costs no accuracy in floating point.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/kernels/paged_fetch.h"
#include "cpu/kernels/paged_tiles.h"

namespace ascend_vllm {
namespace {

class QueryTiles {
 public:
  static constexpr int64_t scratch_floats(int64_t head_size) {
    const int64_t depths = round_up(head_size, kStepDepths);
    return (kMaxLanes + 2 * kTileKeys + 2 * kMaxLanes) * depths / 2 + kTileKeys * kPanelLanes * 3 / 2 +
           2 * kMaxLanes;
  }

  // scale: greater than 0. fetch: of the tiles that follow each tile.
  QueryTiles(const HeadBlocks<bfloat16>& blocks, const QueryRows& rows, float scale, float* scratch,
             const TileFetch<bfloat16>& fetch)
      : blocks_(blocks),
        rows_(rows),
        scale_(scale),
        depths_(round_up(blocks.head_size, kStepDepths)),
        fetch_(fetch) {
    const auto take = [&scratch](int64_t floats) {
      float* taken = scratch;
      scratch += floats;
      return taken;
    };
    const auto take_halves = [&take](int64_t count) { return reinterpret_cast<bfloat16*>(take(count / 2)); };
    max_ = take(kMaxLanes);
    sum_ = take(kMaxLanes);
    scores_ = take(kTileKeys * kPanelLanes);
    weights_ = take_halves(kTileKeys * kPanelLanes);
    keys_ = take_halves(kTileKeys * depths_);
    values_ = take_halves(kTileKeys * depths_);
    queries_ = take_halves(kMaxLanes * depths_);
    out_ = take(kMaxLanes * depths_);
  }

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    for_panels(rows_.count(), [&](int64_t first, auto vecs) {
      constexpr int kVecs = decltype(vecs)::value;
      for (int v = 0; v < kVecs; ++v) {
        const bfloat16* from[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          const int64_t row = first + v * kLanes + lane;
          from[lane] = row < rows_.count() ? query(rows_.begin + row) : kZeros;
        }
        load_vector<kVecs>(from, queries_ + first * depths_ + 2 * v * kLanes);
      }
    });
  }

  // Attends to positions key_begin … key_end-1 that are visible to each row.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    const int64_t lanes = round_up(rows_.count(), kLanes);
    fill(max_, lanes, kNoMax);
    fill(sum_, lanes, 0.0f);
    fill(out_, lanes * depths_, 0.0f);
    const Tiles tiles;
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      // more rows are bound by computing, and get slower by it
      if (rows_.count() <= kPanelLanes) fetch_.start_after(tile);
      const TileRows<bfloat16> keys = tile_keys(tile, begin, end);
      transpose_values(tile, begin, end);
      for_panels(rows_.count(), [&](int64_t first, auto vecs) {
        constexpr int kVecs = decltype(vecs)::value;
        const SeenKeys seen = seen_keys(rows_, first, kVecs * kLanes, tile, begin, end);
        if (seen.low < seen.high) attend_panel<kVecs>(first, tile, seen, keys);
      });
      fetch_.rest();
    }
    for_panels(rows_.count(),
               [&](int64_t first, auto vecs) { write_panel<decltype(vecs)::value>(first, part); });
  }

 private:
  // As an exponent of two.
  static constexpr float kSlack = 8.0f;
  alignas(64) static constexpr bfloat16 kZeros[256] = {};

  // Copies queries of 16 rows into one vector of a panel [depths / 2, panel lanes, 2].
  template <int kVecs>
  void load_vector(const bfloat16* const* from, bfloat16* to) const {
    constexpr int64_t kRow = 2 * kVecs * kLanes;
    int64_t d = 0;
    for (; d < blocks_.head_size; d += 8, to += 4 * kRow) {
      transpose_singles([&](int lane) { return from[lane] + d; },
                        [&](int i, __m512i pairs) { _mm512_store_si512(to + i * kRow, pairs); });
    }
    for (; d < depths_; d += 2, to += kRow) _mm512_store_si512(to, _mm512_setzero_si512());
  }

  // The tile's keys: in place in the cache, or copied and padded with zeros.
  TileRows<bfloat16> tile_keys(int64_t tile, int64_t begin, int64_t end) {
    const int64_t size = blocks_.head_size;
    if (size == depths_) {
      TileRows<bfloat16> rows = rows_in_cache(blocks_, blocks_.keys, tile, begin, end);
      // Keys are scored 32 at a time. Missing blocks are replaced by any other, since their scores are masked.
      for (int64_t run = 0; run * rows.run < kTileKeys; ++run) {
        if ((run + 1) * rows.run <= begin || run * rows.run >= end)
          rows.runs[run] = rows.runs[begin / rows.run];
      }
      return rows;
    }
    for (int64_t n = begin; n < end; ++n) {
      bfloat16* to = keys_ + n * depths_;
      __builtin_memcpy(to, blocks_.key(tile + n), size * sizeof(bfloat16));
      __builtin_memset(to + size, 0, (depths_ - size) * sizeof(bfloat16));
    }
    return {{keys_}, kTileKeys, depths_};
  }

  // Memory beyond the keys in use may contain NaN, which a weight of zero would not mask, so it is zeroed.
  void transpose_values(int64_t tile, int64_t begin, int64_t end) {
    for (int64_t step = round_down(begin, kStepKeys); step < end; step += kStepKeys) {
      const bfloat16* from[kStepKeys];
      for (int64_t k = 0; k < kStepKeys; ++k) {
        const int64_t n = step + k;
        from[k] = n >= begin && n < end ? blocks_.value(tile + n) : kZeros;
      }
      bfloat16* to = values_ + step;
      int64_t d = 0;
      for (; d < blocks_.head_size; d += 8, to += 8 * kTileKeys) {
        fetch_.some(kTileKeys / kStepKeys * 4);
        transpose_halves([&](int k) { return from[k] + d; },
                         [&](int i, __m512i row) { _mm512_store_si512(to + i * kTileKeys, row); });
      }
      for (; d < depths_; ++d, to += kTileKeys) _mm512_store_si512(to, _mm512_setzero_si512());
    }
  }

  // Adds the visible keys of the tile to the panel whose first row is `first`.
  template <int kVecs>
  void attend_panel(int64_t first, int64_t tile, SeenKeys seen, const TileRows<bfloat16>& keys) {
    constexpr int kWidth = kVecs * kLanes;
    const int64_t begin_step = round_down(seen.low, kStepKeys), end_step = round_up(seen.high, kStepKeys);
    finish_writes();
    for (int64_t n = begin_step; n < end_step; n += kStepKeys) {
      score_step<kVecs>(keys.at(n), keys.at(n + kTileHeight), keys.size * sizeof(bfloat16),
                        queries_ + first * depths_, depths_, scores_ + n * kWidth);
    }
    hide<kWidth>(rows_, first, tile, seen.low, seen.high, scores_);
    weigh<kVecs>(first, seen);
    finish_writes();
    float* out = out_ + first * depths_;
    for (int64_t d = 0; d < depths_; d += kStepDepths) {
      add_step<kVecs>(values_ + d * kTileKeys + begin_step, weights_ + begin_step * kWidth,
                      end_step - begin_step, out + d * kWidth);
    }
  }

  // Turns scores into weights and rescales the panel's sums if needed.
  template <int kVecs>
  void weigh(int64_t first, SeenKeys seen) {
    constexpr int kWidth = kVecs * kLanes;
    VecF greatest[kVecs], sum[kVecs];
    greatest_scores<kVecs>(seen, greatest);
    const VecF scale = set1(scale_);
    bool rescales = false;
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      float* max_at = max_ + first + v * kLanes;
      const VecF before = load(max_at), now = greatest[v] * scale;
      const Mask grows = gt(now, before + set1(kSlack));
      greatest[v] = select(grows, now, before);
      sum[v] = load(sum_ + first + v * kLanes);
      const VecF factor = exp2_negative(before - greatest[v]);  // 1 for unchanged rows
      rescales |= bits(grows) != 0;
      store(max_at, greatest[v]);
      store(rescale_ + v * kLanes, factor);
      sum[v] = sum[v] * factor;
    }
    if (rescales) rescale<kVecs>(out_ + first * depths_);
    // keys come in pairs; one that is missing at either end gets the weight 0
    const int64_t low = round_down(seen.low, 2), high = round_up(seen.high, 2);
    if (low < seen.low) fill(scores_ + low * kWidth, kWidth, -__builtin_inff());
    if (high > seen.high) fill(scores_ + seen.high * kWidth, kWidth, -__builtin_inff());
    const float* scores = scores_ + low * kWidth;
    bfloat16* weights = weights_ + low * kWidth;
    // prefetches the panel's sums and the next one's queries from the L2 cache: all of them within 32 pairs
    const float* sums = out_ + first * depths_;
    const bfloat16* queries = queries_ + (first + kWidth) * depths_;
    const int64_t parts = depths_ * kVecs / 64;
    for (const float* last = scores_ + high * kWidth; scores < last;
         scores += 2 * kWidth, weights += 2 * kWidth) {
      fetch_.some(depths_ / 16);
      for (int64_t i = 0; i < parts; ++i, sums += 2 * kLanes, queries += 2 * kLanes) {
        __builtin_prefetch(sums);
        __builtin_prefetch(sums + kLanes);
        __builtin_prefetch(queries);
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        const VecF weight = exp2_coarse(_mm512_fmsub_ps(load(scores + v * kLanes), scale, greatest[v]));
        const VecF next = exp2_coarse(_mm512_fmsub_ps(load(scores + (kVecs + v) * kLanes), scale, greatest[v]));
        store_interleaved(weights + 2 * v * kLanes, weight, next);
        sum[v] = sum[v] + (weight + next);
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) store(sum_ + first + v * kLanes, sum[v]);
    clear_weights(round_down(low, kStepKeys) * kWidth, low * kWidth);
    clear_weights(high * kWidth, round_up(high, kStepKeys) * kWidth);
  }

  // Largest unscaled scores of the visible keys.
  template <int kVecs>
  void greatest_scores(SeenKeys seen, VecF (&greatest)[kVecs]) const {
    constexpr int kWidth = kVecs * kLanes;
    // four keys at a time, since a maximum has a latency of four cycles
    constexpr int kChains = 4;
    VecF chains[kChains][kVecs];
    for (auto& of_key : chains) {
      for (VecF& chain : of_key) chain = set1(-__builtin_inff());
    }
    const auto take = [&](int64_t n, int chain) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        chains[chain][v] = max(chains[chain][v], load(scores_ + n * kWidth + v * kLanes));
      }
    };
    int64_t n = seen.low;
    for (; n + kChains <= seen.high; n += kChains) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) take(n + chain, chain);
    }
    for (; n < seen.high; ++n) take(n, 0);
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      greatest[v] = max(max(chains[0][v], chains[1][v]), max(chains[2][v], chains[3][v]));
    }
  }

  template <int kVecs>
  void rescale(float* out) const {
    VecF factor[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) factor[v] = load(rescale_ + v * kLanes);
    for (int64_t d = 0; d < depths_; ++d) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        float* at = out + (d * kVecs + v) * kLanes;
        store(at, load(at) * factor[v]);
      }
    }
  }

  void clear_weights(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 2 * kLanes) _mm512_store_si512(weights_ + i, _mm512_setzero_si512());
  }

  template <int kVecs>
  void write_panel(int64_t first, Part part) const {
    constexpr int64_t kWidth = kVecs * kLanes;
    const int64_t size = blocks_.head_size, used = min_of(kWidth, rows_.count() - first);
    for (int64_t lane = 0; lane < used; lane += 4) {
      for (int64_t d = 0; d < size; d += kLanes) {
        const float* from = out_ + first * depths_ + d * kWidth + lane;
        const int depths = static_cast<int>(min_of(kLanes, size - d));
        transpose_singles([&](int k) { return from + k * kWidth; },
                          [&](int i, __m512i row) {
                            float* to = part.out + (first + lane + i) * size + d;
                            if (lane + i < used) store_n(to, _mm512_castsi512_ps(row), depths);
                          });
      }
    }
    for (int64_t lane = 0; lane < used; ++lane) {
      part.max[first + lane] = max_[first + lane];
      part.sum[first + lane] = sum_[first + lane];
    }
  }

  const HeadBlocks<bfloat16>& blocks_;
  const QueryRows& rows_;
  const float scale_;
  const int64_t depths_;  // the padded head size
  TileFetch<bfloat16> fetch_;
  float* max_;  // [kMaxLanes]
  float* sum_;
  float* scores_;      // [kTileKeys, panel lanes], not scaled
  bfloat16* weights_;  // [kTileKeys / 2, panel lanes, 2]
  bfloat16* keys_;     // [kTileKeys, depths]
  bfloat16* values_;   // [depths, kTileKeys]
  bfloat16* queries_;  // panels of [depths / 2, panel lanes, 2]
  float* out_;         // panels of [depths, panel lanes]
  alignas(64) float rescale_[kPanelLanes];
};

}  // namespace
}  // namespace ascend_vllm

#endif
