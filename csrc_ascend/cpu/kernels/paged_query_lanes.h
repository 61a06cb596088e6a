// Attention of many query rows, with vector lanes along the rows: everything is transposed, so that keys and
// values are read in place and broadcast, and the softmax needs no sums over lanes. For prompts, and decoding
// with large groups.
//
// A panel (paged_panels.h) has queries [D, lanes] and output [D, lanes]. For a tile of keys it computes scores
// [keys, lanes], turns them into weights in place, and adds weights * values to the output. With Pairs, two
// depths (queries) or two keys (weights, values) are interleaved.
#pragma once

#include "cpu/kernels/paged_products.h"

namespace ascend_vllm {
namespace {

template <class T>
class QueryLanes {
  using Kind = KindOf<T>;
  using Key = typename Kind::Key;
  using Query = typename Kind::Query;
  // Keys or depths whose accumulators fit the registers together with a panel's vectors.
  static constexpr int kBlock = kLanes == 16 ? 8 : 4;
  static constexpr int kBlockOfOne = 8;

 public:
  static constexpr int64_t scratch_floats(int64_t head_size) {
    return 2 * kMaxLanes * head_size + 2 * kTileKeys * head_size + 2 * kTileKeys * kPanelLanes + 3 * kMaxLanes;
  }

  QueryLanes(const HeadBlocks<T>& blocks, const QueryRows& rows, float scale, float* scratch)
      : blocks_(blocks), rows_(rows), scale_(scale) {
    const int64_t size = blocks.head_size;
    const auto take = [&scratch](int64_t floats) {
      float* taken = scratch;
      scratch += floats;
      return taken;
    };
    scores_ = take(kTileKeys * kPanelLanes);
    weights_ = reinterpret_cast<Query*>(Kind::kPaired == 1 ? scores_ : take(kTileKeys * kPanelLanes));
    max_ = take(kMaxLanes);
    sum_ = take(kMaxLanes);
    rescale_ = take(kMaxLanes);
    keys_ = reinterpret_cast<Key*>(take(kTileKeys * size));
    values_ = reinterpret_cast<Key*>(take(kTileKeys * size));
    queries_ = reinterpret_cast<Query*>(take(kMaxLanes * size));
    out_ = take(kMaxLanes * size);
  }

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    const int64_t size = blocks_.head_size;
    for_panels(rows_.count(), [&](int64_t first, auto vecs) {
      constexpr int kWidth = decltype(vecs)::value * kLanes;
      load_panel<Kind, kWidth>([&](int64_t lane) { return query(rows_.begin + first + lane); },
                               min_of(kWidth, rows_.count() - first), size, queries_ + first * size);
    });
  }

  // Attends to positions key_begin … key_end-1 that are visible to each row.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    const int64_t size = blocks_.head_size;
    const int64_t lanes = round_up(rows_.count(), kLanes);
    fill(max_, lanes, kNoMax);
    fill(sum_, lanes, 0.0f);
    fill(out_, lanes * size, 0.0f);
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      const TileRows<Key> keys = tile_keys(tile, begin, end);
      const TileRows<Key> values = tile_values(tile, begin, end);
      for_panels(rows_.count(), [&](int64_t first, auto vecs) {
        constexpr int kVecs = decltype(vecs)::value;
        const SeenKeys seen = seen_keys(rows_, first, kVecs * kLanes, tile, begin, end);
        if (seen.low < seen.high) {
          attend_panel<kVecs>(first, tile, seen.low, seen.high, keys, values, key_end);
        }
      });
    }
    for_panels(rows_.count(), [&](int64_t first, auto vecs) {
      constexpr int kWidth = decltype(vecs)::value * kLanes;
      const int64_t used = min_of(kWidth, rows_.count() - first);
      float* rows = part.out + first * size;
      for_panel_rows<kWidth>(out_ + first * size, used, size,
                             [&](int64_t lane, int64_t d, VecF numbers, int n) {
                               float* to = rows + lane * size + d;
                               n == kLanes ? store(to, numbers) : store_n(to, numbers, n);
                             });
      __builtin_memcpy(part.max + first, max_ + first, used * sizeof(float));
      __builtin_memcpy(part.sum + first, sum_ + first, used * sizeof(float));
    });
  }

 private:
  // The tile's keys: in place in the cache if the type matches, else converted.
  TileRows<Key> tile_keys(int64_t tile, int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, Key>) {
      return rows_in_cache(blocks_, blocks_.keys, tile, begin, end);
    } else {
      // whole groups of keys are scored, also invisible ones, whose scores are masked
      widen(keys_, blocks_.keys, tile, round_down(begin, 8), round_up(end, 8));
      return {{keys_}, kTileKeys, blocks_.head_size};
    }
  }

  // The tile's values, likewise; with Pairs they are copied as [kTileKeys / 2, D, 2].
  TileRows<Key> tile_values(int64_t tile, int64_t begin, int64_t end) {
    if constexpr (Kind::kPaired == 2) {
      pair_values(tile, begin, end);
    } else if constexpr (std::is_same_v<T, Key>) {
      return rows_in_cache(blocks_, blocks_.values, tile, begin, end);
    } else {
      widen(values_, blocks_.values, tile, begin, end);
    }
    return {{values_}, kTileKeys, blocks_.head_size};
  }

  void widen(float* to, const T* cache, int64_t tile, int64_t begin, int64_t end) const {
    for (int64_t n = begin; n < end;) {
      const int64_t run_end = min_of(end, round_down(n, blocks_.block_size()) + blocks_.block_size());
      const T* from = cache + blocks_.offset(tile + n);
      const int64_t first = n * blocks_.head_size, count = (run_end - n) * blocks_.head_size;
      for_lanes(
          count, [&](int64_t i) { store(to + first + i, load(from + i)); },
          [&](int64_t i, int rest) { store_n(to + first + i, load_n(from + i, rest), rest); });
      n = run_end;
    }
  }

  void pair_values(int64_t tile, int64_t begin, int64_t end) {
    const int64_t size = blocks_.head_size;
    for (int64_t n = round_down(begin, 2); n < end; n += 2) {
      const T* from = blocks_.value(tile + n);
      Key* to = values_ + n * size;
      if (n >= begin && n + 1 < end) {
        pair_rows(from, from + size, size, to);
      } else {
        // memory beyond the keys in use may contain NaN, which a weight of zero would not mask
        for (int64_t d = 0; d < size; ++d) {
          to[2 * d] = n >= begin ? from[d] : Key{};
          to[2 * d + 1] = n + 1 < end ? from[size + d] : Key{};
        }
      }
    }
  }

  // Keys low … high-1 of the tile for the panel whose first row is `first`.
  template <int kVecs>
  void attend_panel(int64_t first, int64_t tile, int64_t low, int64_t high, const TileRows<Key>& keys,
                    const TileRows<Key>& values, int64_t key_end) {
    constexpr int kCount = kVecs == 1 ? kBlockOfOne : kBlock;
    constexpr int kWidth = kVecs * kLanes;
    const int64_t size = blocks_.head_size;
    const VecF scale = set1(scale_);
    for (int64_t n = round_down(low, kCount); n < high; n += kCount) {
      if (first == 0 && tile + kTileKeys + n < key_end)
        blocks_.prefetch(blocks_.keys, tile + kTileKeys + n, kCount);
      score_keys<Kind, kCount, kVecs>(keys.at(n), queries_ + first * size, size, scale, scores_ + n * kWidth);
    }
    if (rows_.changes_scores()) change_scores<kWidth>(rows_, first, tile, low, high, scores_);
    hide<kWidth>(rows_, first, tile, low, high, scores_);
    const int64_t even = round_down(low, Kind::kPaired);
    weigh<kVecs>(first, low, high, even);
    // prefetches the values of the next tile a few at a time; with small heads not all of them
    int64_t ahead = tile + kTileKeys;
    for (int64_t d = 0; d < size; d += kCount, ahead += kCount) {
      if (first == 0 && ahead < min_of(key_end, tile + 2 * kTileKeys))
        blocks_.prefetch(blocks_.values, ahead, kCount);
      add_values<Kind, kCount, kVecs>(values, weights_, even, high, d, rescale_,
                                      out_ + first * size + d * kWidth);
    }
  }

  // Turns scores into weights; sets rescale_ to the factors for the earlier sums.
  template <int kVecs>
  void weigh(int64_t first, int64_t low, int64_t high, int64_t even) {
    constexpr int kWidth = kVecs * kLanes;
    VecF greatest[kVecs], sum[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) greatest[v] = load(max_ + first + v * kLanes);
    for (int64_t n = low; n < high; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) greatest[v] = max(greatest[v], load(scores_ + n * kWidth + v * kLanes));
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const VecF rescale = exp2_negative(load(max_ + first + v * kLanes) - greatest[v]);
      store(rescale_ + v * kLanes, rescale);
      store(max_ + first + v * kLanes, greatest[v]);
      sum[v] = load(sum_ + first + v * kLanes) * rescale;
    }
    const auto weight_at = [&](int64_t n, int v) {
      return weight_of<Kind>(load(scores_ + n * kWidth + v * kLanes) - greatest[v]);
    };
    if constexpr (Kind::kPaired == 1) {
      for (int64_t n = low; n < high; ++n) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecF weight = weight_at(n, v);
          store(scores_ + n * kWidth + v * kLanes, weight);
          sum[v] = sum[v] + weight;
        }
      }
    } else {
      // keys come in pairs; one that is missing at either end gets the weight 0
      if (even < low) fill(scores_ + even * kWidth, kWidth, -__builtin_inff());
      if ((high - even) % 2 != 0) fill(scores_ + high * kWidth, kWidth, -__builtin_inff());
      for (int64_t n = even; n < high; n += 2) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecF weight = weight_at(n, v), next = weight_at(n + 1, v);
          store_pairs(weights_ + n * kWidth + 2 * v * kLanes, weight, next);
          sum[v] = sum[v] + weight + next;
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(sum_ + first + v * kLanes, sum[v]);
  }

  const HeadBlocks<T>& blocks_;
  const QueryRows& rows_;
  const float scale_;
  float* scores_;   // [kTileKeys, panel lanes]
  Query* weights_;  // the same memory, or with Pairs [kTileKeys / 2, panel lanes, 2]
  float* max_;      // [kMaxLanes]
  float* sum_;
  float* rescale_;  // [panel lanes]
  Key* keys_;       // [kTileKeys, D]
  Key* values_;
  Query* queries_;  // panels of [D, lanes]
  float* out_;      // panels of [D, lanes]
};

}  // namespace
}  // namespace ascend_vllm
