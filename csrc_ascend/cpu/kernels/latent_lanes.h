// Attention whose values may be parts of the keys, or narrower than they, with vector lanes along query rows,
// by the products of paged_products.h.
//
// For each tile of keys, all panels of query rows (paged_panels.h) get their weights first; then the values are
// arranged a few depths at a time, which stay in the L1 cache while every panel adds them. Sums stay in the
// panels' layout, [depth, lanes], until all keys are done.
#pragma once

#include "cpu/kernels/paged_products.h"

namespace ascend_vllm {
namespace {

// The keys and values of a sequence for one head.
template <class T>
struct AttendedRows {
  const T* keys;  // rows of `key_width` elements
  const T* values;
  int64_t key_width, value_stride, value_width;
  const int32_t*
      table;  // block of 1 << block_shift rows that each such number of positions is in; null: all in one
  int block_shift;
  int64_t first = 0;  // position of the first row, if all are in one block

  int64_t row(int64_t position) const {
    if (table == nullptr) return position - first;
    const int64_t size = int64_t{1} << block_shift;
    return table[position >> block_shift] * size + (position & (size - 1));
  }
  const T* key(int64_t position) const { return keys + row(position) * key_width; }
  const T* value(int64_t position) const { return values + row(position) * value_stride; }
  // Positions of a tile that are contiguous in memory.
  int64_t run() const { return table == nullptr ? kTileKeys : min_of(int64_t{1} << block_shift, kTileKeys); }
};

// Sums over some of the keys: out [depth, lanes] of each panel, and [lanes]. With tiles, `out` is
// [depths / 16, 16 rows, 16 depths] of each 16 rows.
struct LanesPart {
  static constexpr int64_t kDepths = 32;  // a multiple of so many depths has memory

  float *out, *max, *sum;

  // A panel's width is that of one or two vectors, of at most 16 lanes.
  static constexpr int64_t lanes(int64_t rows) { return round_up(rows, 16); }
  static constexpr int64_t floats(int64_t rows, int64_t width) {
    return lanes(rows) * (round_up(width, kDepths) + 2);
  }
  static LanesPart at(float* memory, int64_t rows, int64_t width) {
    float* max = memory + lanes(rows) * round_up(width, kDepths);
    return {memory, max, max + lanes(rows)};
  }
};

// scores[k, lanes] = scale * keys[k] . queries for 8 keys [8, size] and kVecs vectors of queries.
template <class Kind, int kVecs>
inline void score_eight(const typename Kind::Key* keys, const typename Kind::Query* queries, int64_t size,
                        VecF scale, float* scores) {
  VecF acc[8][kVecs];
  for (auto& of_key : acc) {
    for (VecF& sum : of_key) sum = set1(0.0f);
  }
  // two pointers and two distances, which the compiler must not replace by eight pointers: they would not fit
  // into the registers
  int64_t one = size, three = 3 * size;
  asm("" : "+r"(one), "+r"(three));
  for (int64_t d = 0; d < size; d += Kind::kPaired) {
    const typename Kind::Key *low = keys + d, *high = low + 4 * size;
    asm("" : "+r"(low), "+r"(high));
    typename Kind::Lanes query[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) query[v] = Kind::lanes(queries + (d * kVecs + v * Kind::kPaired) * kLanes);
    const auto add = [&](int k, const typename Kind::Key* at) __attribute__((always_inline)) {
      const auto key = Kind::broadcast(at);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[k][v] = Kind::multiply_add(acc[k][v], key, query[v]);
    };
    add(0, low);
    add(1, low + one);
    add(2, low + 2 * one);
    add(3, low + three);
    add(4, high);
    add(5, high + one);
    add(6, high + 2 * one);
    add(7, high + three);
  }
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(scores + (k * kVecs + v) * kLanes, acc[k][v] * scale);
  }
}

template <class T>
class LatentLanes {
  using Kind = KindOf<T>;
  using Key = typename Kind::Key;
  using Query = typename Kind::Query;
  // Depths of values that are arranged at a time.
  static constexpr int64_t kDepths = 32;
  // Keys or depths whose accumulators fit the registers together with a panel's vectors.
  template <int kVecs>
  static constexpr int kBlock = kVecs == 1 || kLanes == 16 ? 8 : 4;

 public:
  static constexpr int64_t kMostRows = 128;

  static constexpr int64_t scratch_floats(int64_t key_width) {
    return kMaxLanes * key_width + kTileKeys * (key_width + kDepths + kPanelLanes + kMaxLanes) + kMaxLanes;
  }

  // The memory for values in the scratch of a form.
  static Key* values_of(float* scratch) {
    return reinterpret_cast<Key*>(scratch + kTileKeys * (kPanelLanes + kMaxLanes));
  }

  LatentLanes(const AttendedRows<T>& attended, const QueryRows& rows, float scale, float* scratch)
      : attended_(attended), rows_(rows), scale_(scale), values_(values_of(scratch)) {
    const auto take = [&scratch](int64_t floats) {
      float* taken = scratch;
      scratch += floats;
      return taken;
    };
    scores_ = take(kTileKeys * kPanelLanes);
    weights_ = reinterpret_cast<Query*>(take(kTileKeys * kMaxLanes));
    take(kTileKeys * kDepths);
    keys_ = reinterpret_cast<Key*>(take(kTileKeys * attended.key_width));
    queries_ = reinterpret_cast<Query*>(take(kMaxLanes * attended.key_width));
    rescale_ = take(kMaxLanes);
  }

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    const int64_t size = attended_.key_width;
    for_panels(rows_.count(), [&](int64_t first, auto vecs) {
      constexpr int kWidth = decltype(vecs)::value * kLanes;
      load_panel<Kind, kWidth>([&](int64_t lane) { return query(rows_.begin + first + lane); },
                               min_of(kWidth, rows_.count() - first), size, queries_ + first * size);
    });
  }

  // Attends to positions key_begin … key_end-1 that are visible to each row; key_begin is a multiple of
  // kTileKeys.
  void attend(int64_t key_begin, int64_t key_end, LanesPart part) {
    const int64_t lanes = round_up(rows_.count(), kLanes), width = attended_.value_width;
    fill(part.max, lanes, kNoMax);
    fill(part.sum, lanes, 0.0f);
    fill(part.out, lanes * width, 0.0f);
    for (int64_t tile = key_begin; tile < key_end; tile += kTileKeys) {
      const int64_t end = min_of(key_end - tile, kTileKeys);
      const TileRows<Key> keys = tile_keys(tile, end);
      for_panels(rows_.count(), [&](int64_t first, auto vecs) {
        constexpr int kVecs = decltype(vecs)::value;
        const int64_t high = seen_keys(rows_, first, kVecs * kLanes, tile, 0, end).high;
        if (high <= 0) return;
        score<kVecs>(first, tile, high, key_end, keys, scores_);
        weigh<kVecs>(first, high, part, scores_, weights_ + first * kTileKeys, rescale_ + first);
      });
      for (int64_t depth = 0; depth < width; depth += kDepths) {
        add_depths(tile, end, depth, keys, weights_, rescale_, values_, part);
      }
    }
  }

  // Most rows and keys that `attend_together` is for.
  static constexpr int64_t kTogetherRows = 16, kTogetherKeys = 512;

  // Whether the memory behind the queries has room for what `attend_together` shares, and nothing is converted.
  bool can_attend_together(int64_t key_end) const {
    const int64_t shared = (key_end + kTileKeys - 1) / kTileKeys * (2 * kTileKeys + 1) * kTogetherRows;
    return std::is_same_v<T, Key> && rows_.count() <= kTogetherRows && key_end <= kTogetherKeys &&
           (kMaxLanes - kTogetherRows) * attended_.key_width >= shared;
  }

  // The same as `attend` from the first key on, by several threads, for a single sequence: each part of a first
  // job has the scores of a tile, each part of a second one the sums of some depths. run(parts, part) calls
  // part(index, values) for each index, with memory for [kTileKeys, kDepths] values that no other thread uses.
  template <class Run>
  void attend_together(int64_t key_end, LanesPart part, const Run& run) {
    const int64_t lanes = round_up(rows_.count(), kLanes), width = attended_.value_width;
    constexpr int64_t kTile = kTileKeys * kTogetherRows;
    const int64_t tiles = (key_end + kTileKeys - 1) / kTileKeys;
    float* scores = reinterpret_cast<float*>(queries_) + kTogetherRows * attended_.key_width;
    float* weights = scores + tiles * kTile;
    float* rescale = weights + tiles * kTile;
    const auto for_tile = [&](int64_t index, const auto& body) {
      const int64_t tile = index * kTileKeys, end = min_of(key_end - tile, kTileKeys);
      for_panels(rows_.count(), [&](int64_t first, auto vecs) {
        const int64_t high = seen_keys(rows_, first, decltype(vecs)::value * kLanes, tile, 0, end).high;
        if (high > 0) body(tile, end, first, high, vecs);
      });
    };
    run(tiles, [&](int64_t index, Key*) {
      for_tile(index, [&](int64_t tile, int64_t end, int64_t first, int64_t high, auto vecs) {
        score<decltype(vecs)::value>(first, tile, high, key_end, tile_keys(tile, end),
                                     scores + index * kTile + first * kTileKeys);
      });
    });
    fill(part.max, lanes, kNoMax);
    fill(part.sum, lanes, 0.0f);
    for (int64_t index = 0; index < tiles; ++index) {
      for_tile(index, [&](int64_t, int64_t, int64_t first, int64_t high, auto vecs) {
        weigh<decltype(vecs)::value>(first, high, part, scores + index * kTile + first * kTileKeys,
                                     reinterpret_cast<Query*>(weights + index * kTile) + first * kTileKeys,
                                     rescale + index * kTogetherRows + first);
      });
    }
    run((width + kDepths - 1) / kDepths, [&](int64_t block, Key* values) {
      const int64_t depth = block * kDepths, depths = min_of(kDepths, width - depth);
      for_panels(rows_.count(), [&](int64_t first, auto vecs) {
        constexpr int64_t kWidth = decltype(vecs)::value * kLanes;
        fill(part.out + first * width + depth * kWidth, depths * kWidth, 0.0f);
      });
      for (int64_t index = 0; index < tiles; ++index) {
        const int64_t tile = index * kTileKeys, end = min_of(key_end - tile, kTileKeys);
        add_depths(tile, end, depth, tile_keys(tile, end), reinterpret_cast<Query*>(weights + index * kTile),
                   rescale + index * kTogetherRows, values, part);
      }
    });
  }

  // total += part
  void merge(LanesPart total, LanesPart part) const {
    const int64_t width = attended_.value_width;
    for_panels(rows_.count(), [&](int64_t first, auto vecs) {
      constexpr int kVecs = decltype(vecs)::value;
      for (int v = 0; v < kVecs; ++v) {
        const int64_t lane = first + v * kLanes, at = first * width + v * kLanes;
        const VecF before = load(total.max + lane), other = load(part.max + lane),
                   greatest = max(before, other);
        const VecF factor = exp2_negative(before - greatest), other_factor = exp2_negative(other - greatest);
        store(total.max + lane, greatest);
        store(total.sum + lane, load(total.sum + lane) * factor + load(part.sum + lane) * other_factor);
        for (int64_t d = 0; d < width; ++d) {
          float* to = total.out + at + d * kVecs * kLanes;
          store(to, load(to) * factor + load(part.out + at + d * kVecs * kLanes) * other_factor);
        }
      }
    });
  }

  // Writes the results; out(row) is where those of a row go.
  template <class RowOf>
  void write(LanesPart total, const RowOf& out) const {
    const int64_t width = attended_.value_width;
    for_panels(rows_.count(), [&](int64_t first, auto vecs) {
      constexpr int kWidth = decltype(vecs)::value * kLanes;
      const int64_t used = min_of(kWidth, rows_.count() - first);
      for_panel_rows<kWidth>(total.out + first * width, used, width,
                             [&](int64_t lane, int64_t d, VecF numbers, int n) {
                               const VecF result = numbers * set1(1.0f / total.sum[first + lane]);
                               T* to = out(rows_.begin + first + lane) + d;
                               n == kLanes ? store(to, result) : store_n(to, result, n);
                             });
    });
  }

 private:
  // The tile's keys: in place if the type matches, else converted.
  TileRows<Key> tile_keys(int64_t tile, int64_t end) {
    const int64_t size = attended_.key_width, run = attended_.run();
    TileRows<Key> rows{{}, run, size};
    // whole groups of 8 keys are scored, also invisible ones, whose scores are masked
    for (int64_t n = 0; n < end; n += run) {
      const T* from = attended_.key(tile + n);
      if constexpr (std::is_same_v<T, Key>) {
        rows.runs[n / run] = from;
      } else {
        rows.runs[n / run] = keys_ + n * size;
        widen(from, keys_ + n * size, min_of(run, round_up(end, 8) - n) * size);
      }
    }
    return rows;
  }

  // The tile's values in place.
  TileRows<T> values_in_place(int64_t tile, int64_t end) const {
    TileRows<T> rows{{}, attended_.run(), attended_.value_stride};
    for (int64_t n = 0; n < end; n += rows.run) rows.runs[n / rows.run] = attended_.value(tile + n);
    return rows;
  }

  // `depths` elements of the tile's values from `depth` on; they begin at element `base` of the rows returned.
  // With Pairs they are copied as [kTileKeys / 2, kDepths, 2].
  TileRows<Key> tile_values(const TileRows<T>& in_place, int64_t end, int64_t depth, int64_t depths,
                            const TileRows<Key>& keys, Key* copies, int64_t& base) const {
    const int64_t stride = in_place.size;
    if constexpr (Kind::kPaired == 2) {
      for (int64_t first = 0; first < end; first += in_place.run) {
        const T* from = in_place.runs[first / in_place.run] + depth;
        const int64_t last = min_of(first + in_place.run, end);
        int64_t n = first;
        if (depths == kDepths) {
          for (; n + 1 < last; n += 2, from += 2 * stride) {
            for (int64_t d = 0; d < kDepths; d += 2 * kLanes) {
              interleave<2 * kLanes>(from + d, from + stride + d, copies + n * kDepths + 2 * d);
            }
          }
        }
        for (; n < last; n += 2, from += 2 * stride) {
          // memory beyond the keys in use may contain NaN, which a weight of zero would not mask
          const bool is_pair = n + 1 < last;
          Key* to = copies + n * kDepths;
          for (int64_t d = 0; d < depths; ++d) {
            to[2 * d] = from[d];
            to[2 * d + 1] = is_pair ? from[stride + d] : Key{};
          }
        }
      }
      return {{copies}, kTileKeys, kDepths};
    } else if constexpr (std::is_same_v<T, Key>) {
      base = depth;
      return in_place;
    } else {
      if (attended_.values == attended_.keys) {
        base = depth;
        return keys;
      }
      for (int64_t n = 0; n < end; ++n) widen(in_place.at(n) + depth, copies + n * kDepths, depths);
      return {{copies}, kTileKeys, kDepths};
    }
  }

  static void widen(const T* from, float* to, int64_t n) {
    for_lanes(
        n, [&](int64_t i) { store(to + i, load(from + i)); },
        [&](int64_t i, int rest) { store_n(to + i, load_n(from + i, rest), rest); });
  }

  // Adds the tile's keys, of which the first `end` are in use, to the sums of some depths of all rows.
  void add_depths(int64_t tile, int64_t end, int64_t depth, const TileRows<Key>& keys, const Query* weights,
                  const float* rescale, Key* copies, LanesPart part) const {
    const int64_t width = attended_.value_width, depths = min_of(kDepths, width - depth);
    int64_t base = 0;
    const TileRows<Key> values =
        tile_values(values_in_place(tile, end), end, depth, depths, keys, copies, base);
    for_panels(rows_.count(), [&](int64_t first, auto vecs) {
      constexpr int kVecs = decltype(vecs)::value, kCount = kBlock<kVecs>;
      const int64_t high = seen_keys(rows_, first, kVecs * kLanes, tile, 0, end).high;
      if (high <= 0) return;
      float* out = part.out + first * width + depth * kVecs * kLanes;
      for (int64_t d = 0; d < depths; d += kCount) {
        add_values<Kind, kCount, kVecs>(values, weights + first * kTileKeys, 0, high, base + d, rescale + first,
                                        out + d * kVecs * kLanes);
      }
    });
  }

  // Scores of keys 0 … high-1 of the tile for the panel whose first row is `first`: [high, lanes].
  template <int kVecs>
  void score(int64_t first, int64_t tile, int64_t high, int64_t key_end, const TileRows<Key>& keys,
             float* scores) const {
    constexpr int kCount = kBlock<kVecs>, kWidth = kVecs * kLanes;
    const int64_t size = attended_.key_width;
    const VecF scale = set1(scale_);
    for (int64_t n = 0; n < high; n += kCount) {
      if (first == 0) prefetch(tile + kTileKeys + n, kCount, key_end);
      if constexpr (kCount == 8) {
        score_eight<Kind, kVecs>(keys.at(n), queries_ + first * size, size, scale, scores + n * kWidth);
      } else {
        score_keys<Kind, kCount, kVecs>(keys.at(n), queries_ + first * size, size, scale, scores + n * kWidth);
      }
    }
    hide<kWidth>(rows_, first, tile, 0, high, scores);
  }

  // Prefetches keys of the next tile into the L2 cache; blocks are scattered, so hardware prefetching does not
  // find the next one. Always inline, see HeadBlocks.
  [[gnu::always_inline]] void prefetch(int64_t position, int64_t count, int64_t key_end) const {
    if (position >= key_end) return;
    const T* from = attended_.key(position);
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t i = 0; i < count * attended_.key_width; i += kLine) __builtin_prefetch(from + i, 0, 2);
  }

  // Turns a panel's scores into its weights; sets `rescales` to the factors for the earlier sums.
  template <int kVecs>
  void weigh(int64_t first, int64_t high, LanesPart part, float* scores, Query* weights,
             float* rescales) const {
    constexpr int kWidth = kVecs * kLanes;
    VecF greatest[kVecs], sum[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) greatest[v] = load(part.max + first + v * kLanes);
    for (int64_t n = 0; n < high; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) greatest[v] = max(greatest[v], load(scores + n * kWidth + v * kLanes));
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const int64_t lane = first + v * kLanes;
      const VecF rescale = exp2_negative(load(part.max + lane) - greatest[v]);
      store(rescales + v * kLanes, rescale);
      store(part.max + lane, greatest[v]);
      sum[v] = load(part.sum + lane) * rescale;
    }
    const auto weight_at = [&](int64_t n, int v) {
      return weight_of<Kind>(load(scores + n * kWidth + v * kLanes) - greatest[v]);
    };
    if constexpr (Kind::kPaired == 1) {
      for (int64_t n = 0; n < high; ++n) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecF weight = weight_at(n, v);
          store(weights + n * kWidth + v * kLanes, weight);
          sum[v] = sum[v] + weight;
        }
      }
    } else {
      // keys come in pairs; one that is missing at the end gets the weight 0
      if (high % 2 != 0) fill(scores + high * kWidth, kWidth, -__builtin_inff());
      for (int64_t n = 0; n < high; n += 2) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecF weight = weight_at(n, v), next = weight_at(n + 1, v);
          store_pairs(weights + n * kWidth + 2 * v * kLanes, weight, next);
          sum[v] = sum[v] + weight + next;
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(part.sum + first + v * kLanes, sum[v]);
  }

  const AttendedRows<T>& attended_;
  const QueryRows& rows_;
  const float scale_;
  Key* const values_;  // [kTileKeys, kDepths]
  float* scores_;      // [kTileKeys, panel lanes]
  Query* weights_;     // panels of [keys, lanes]; with Pairs [keys / 2, lanes, 2]
  Key* keys_;          // [kTileKeys, key_width]
  Query* queries_;     // panels of [key_width, lanes]
  float* rescale_;     // [kMaxLanes]
};

// What attends to rows of T.
template <class T>
struct LatentFormOf {
  using type = LatentLanes<T>;
};

}  // namespace
}  // namespace ascend_vllm
