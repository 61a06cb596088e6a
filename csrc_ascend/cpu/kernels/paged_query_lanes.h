// Attention of many query rows, with vector lanes along the rows: everything is transposed, so that keys and
// values are read in place and broadcast, and the softmax needs no sums over lanes. For prompts, and decoding
// with large groups.
//
// A panel (paged_panels.h) has queries [D, lanes] and output [D, lanes]. For a tile of keys it computes scores
// [keys, lanes], turns them into weights in place, and adds weights * values to the output. With Pairs, two
// depths (queries) or two keys (weights, values) are interleaved.
#pragma once

#include "cpu/kernels/paged_products.h"
// after the former
#include "cpu/kernels/paged_transpose.h"

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
      Query* panel = queries_ + first * size;
      const int64_t used = min_of(kWidth, rows_.count() - first);
      const int64_t whole = transpose_queries<kWidth>(query, first, used, panel);
      for (int64_t lane = 0; lane < used; ++lane) {
        const T* from = query(rows_.begin + first + lane);
        for (int64_t d = whole; d < size; ++d) panel[position_of(d, lane, kWidth)] = convert(from[d]);
      }
      for (int64_t lane = used; lane < kWidth; ++lane) {
        for (int64_t d = whole; d < size; ++d) panel[position_of(d, lane, kWidth)] = Query{};
      }
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
      const float* panel = out_ + first * size;
      const int64_t used = min_of(kWidth, rows_.count() - first);
      const int64_t whole = transpose_out<kWidth>(panel, used, part.out + first * size);
      for (int64_t lane = 0; lane < used; ++lane) {
        float* to = part.out + (first + lane) * size;
        for (int64_t d = whole; d < size; ++d) to[d] = panel[d * kWidth + lane];
        part.max[first + lane] = max_[first + lane];
        part.sum[first + lane] = sum_[first + lane];
      }
    });
  }

 private:
  // What transposing several rows at once has done of load_queries: so many numbers of each row.
  template <int kWidth, class RowOf>
  int64_t transpose_queries([[maybe_unused]] const RowOf& query, [[maybe_unused]] int64_t first,
                            [[maybe_unused]] int64_t used, [[maybe_unused]] Query* panel) const {
#ifdef __AVX512F__
    if constexpr (std::is_same_v<T, Query>) {
      constexpr int64_t kNumbers = 4 * Kind::kPaired;  // of a row at a time: 16 bytes
      static constexpr T kZeros[kNumbers] = {};
      const int64_t whole = round_down(blocks_.head_size, kNumbers);
      for (int64_t lane = 0; lane < kWidth; lane += kLanes) {
        const T* from[kLanes];
        for (int64_t k = 0; k < kLanes; ++k) {
          from[k] = lane + k < used ? query(rows_.begin + first + lane + k) : nullptr;
        }
        for (int64_t d = 0; d < whole; d += kNumbers) {
          transpose_singles([&](int k) { return from[k] == nullptr ? kZeros : from[k] + d; },
                            [&](int i, __m512i lanes) {
                              Query* to = panel + position_of(d + i * Kind::kPaired, lane, kWidth);
                              _mm512_storeu_si512(to, lanes);
                            });
        }
      }
      return whole;
    }
#endif
    return 0;
  }
  // The same of the output of a panel, [D, kWidth], to rows of `to`, [used, D].
  template <int kWidth>
  int64_t transpose_out([[maybe_unused]] const float* panel, [[maybe_unused]] int64_t used,
                        [[maybe_unused]] float* to) const {
#ifdef __AVX512F__
    const int64_t size = blocks_.head_size, whole = round_down(size, kLanes);
    for (int64_t lane = 0; lane < used; lane += 4) {
      for (int64_t d = 0; d < whole; d += kLanes) {
        transpose_singles([&](int k) { return panel + (d + k) * kWidth + lane; },
                          [&](int i, __m512i numbers) {
                            if (lane + i < used) _mm512_storeu_si512(to + (lane + i) * size + d, numbers);
                          });
      }
    }
    return whole;
#else
    return 0;
#endif
  }

  // Weights that become bfloat16 need no more than exp2_coarse has.
  static VecF weight(VecF t) {
#ifdef __AVX512F__
    if constexpr (Kind::kPaired == 2) return exp2_coarse(t);
#endif
    return exp2_negative(t);
  }

  static Query convert(T x) {
    if constexpr (std::is_same_v<T, Query>) {
      return x;
    } else {
      return to_float(x);
    }
  }
  static int64_t position_of(int64_t d, int64_t lane, int64_t width) {
    return d / Kind::kPaired * Kind::kPaired * width + lane * Kind::kPaired + d % Kind::kPaired;
  }

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

  // to[size, 2] = two rows.
  static void pair_rows(const T* first, const T* second, int64_t size, Key* to) {
    int64_t d = 0;
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 2) {
      const __m512i low = alternating_halves(0, 32), high = alternating_halves(16, 32);
      for (; d + 32 <= size; d += 32) {
        const __m512i a = _mm512_loadu_si512(first + d), b = _mm512_loadu_si512(second + d);
        _mm512_storeu_si512(to + 2 * d, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(to + 2 * d + 32, _mm512_permutex2var_epi16(a, high, b));
      }
    }
#endif
    for (; d < size; ++d) {
      to[2 * d] = first[d];
      to[2 * d + 1] = second[d];
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
    const auto weight_of = [&](int64_t n, int v) {
      return weight(load(scores_ + n * kWidth + v * kLanes) - greatest[v]);
    };
    if constexpr (Kind::kPaired == 1) {
      for (int64_t n = low; n < high; ++n) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecF weight = weight_of(n, v);
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
          const VecF weight = weight_of(n, v), next = weight_of(n + 1, v);
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
