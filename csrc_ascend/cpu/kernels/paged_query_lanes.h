// Attention of many query rows, lanes along the rows: everything is transposed, so that keys and values are
// read in place and broadcast, and the softmax needs no sums over lanes. Serves prompts, and decoding with
// large groups.
//
// The rows of a work item are cut into panels of kPanelVecs vectors (a last one of a single vector if that
// does). A panel holds queries [D, lanes] and output [D, lanes]; for a tile of keys it makes scores [keys,
// lanes], turns them into weights in place, and adds weights * values to the output. With Pairs, two depths
// (queries) or two keys (weights, values) lie side by side.
#pragma once

#include "cpu/kernels/paged_softmax.h"

namespace ascend_vllm {
namespace {

constexpr int kPanelVecs = 2;
constexpr int kPanelLanes = kPanelVecs * kLanes;
// Lanes of all panels of an item.
constexpr int kMaxLanes = 128 + kPanelLanes;

// scores[r, lanes] = scale * keys[r] . queries for kCount keys.
template <class Kind, int kCount, int kVecs>
inline void score_keys(const typename Kind::Element* keys, const typename Kind::Element* queries, int64_t size,
                       VecF scale, float* scores) {
  VecF acc[kCount][kVecs];
  for (auto& of_key : acc) {
    for (VecF& sum : of_key) sum = set1(0.0f);
  }
  for (int64_t d = 0; d < size; d += Kind::kDepth) {
    decltype(Kind::lanes(queries)) query[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) query[v] = Kind::lanes(queries + (d * kVecs + v * Kind::kDepth) * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) {
      const auto key = Kind::broadcast(keys + k * size + d);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[k][v] = Kind::multiply_add(acc[k][v], key, query[v]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kCount; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(scores + (k * kVecs + v) * kLanes, acc[k][v] * scale);
  }
}

// out[r, lanes] = out * rescale + sum over keys of values[key, r] * weights[key, lanes] for kCount depths r.
template <class Kind, int kCount, int kVecs>
inline void add_values(const typename Kind::Element* values, const typename Kind::Element* weights,
                       int64_t keys, int64_t size, const float* rescale, float* out) {
  VecF acc[kCount][kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    const VecF factor = load(rescale + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) acc[r][v] = load(out + (r * kVecs + v) * kLanes) * factor;
  }
  for (int64_t n = 0; n < keys; n += Kind::kDepth) {
    decltype(Kind::lanes(weights)) weight[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) weight[v] = Kind::lanes(weights + (n * kVecs + v * Kind::kDepth) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
      const auto value = Kind::broadcast(values + n * size + r * Kind::kDepth);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[r][v] = Kind::multiply_add(acc[r][v], value, weight[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(out + (r * kVecs + v) * kLanes, acc[r][v]);
  }
}

// Rounds two vectors and lays their lanes side by side.
inline void store_pairs(bfloat16* p, VecF first, VecF second) {
  bfloat16 rounded[2][kLanes];
  store(rounded[0], first);
  store(rounded[1], second);
  for (int i = 0; i < kLanes; ++i) {
    p[2 * i] = rounded[0][i];
    p[2 * i + 1] = rounded[1][i];
  }
}

template <class T>
class QueryLanes {
  using Kind = KindOf<T>;
  using Element = typename Kind::Element;
  // Keys or depths whose accumulators fit the registers beside a panel's vectors.
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
    weights_ = reinterpret_cast<Element*>(Kind::kDepth == 1 ? scores_ : take(kTileKeys * kPanelLanes));
    max_ = take(kMaxLanes);
    sum_ = take(kMaxLanes);
    rescale_ = take(kMaxLanes);
    keys_ = reinterpret_cast<Element*>(take(kTileKeys * size));
    values_ = reinterpret_cast<Element*>(take(kTileKeys * size));
    queries_ = reinterpret_cast<Element*>(take(kMaxLanes * size));
    out_ = take(kMaxLanes * size);
  }

  // query(row) is the first element of a row.
  template <class Query>
  void load_queries(const Query& query) {
    const int64_t size = blocks_.head_size;
    for_panels([&](int64_t first, auto vecs) {
      constexpr int kWidth = decltype(vecs)::value * kLanes;
      Element* panel = queries_ + first * size;
      const int64_t used = min_of(kWidth, rows_.count() - first);
      for (int64_t lane = 0; lane < used; ++lane) {
        const T* from = query(rows_.begin + first + lane);
        for (int64_t d = 0; d < size; ++d) panel[position_of(d, lane, kWidth)] = convert(from[d]);
      }
      for (int64_t lane = used; lane < kWidth; ++lane) {
        for (int64_t d = 0; d < size; ++d) panel[position_of(d, lane, kWidth)] = Element{};
      }
    });
  }

  // Attends to positions key_begin … key_end-1, as far as each row sees them.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    const int64_t size = blocks_.head_size;
    const int64_t lanes = round_up(rows_.count(), kLanes);
    fill(max_, lanes, kNoMax);
    fill(sum_, lanes, 0.0f);
    fill(out_, lanes * size, 0.0f);
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      const Element* keys = tile_keys(tile, begin, end);
      const Element* values = tile_values(tile, begin, end);
      for_panels([&](int64_t first, auto vecs) {
        constexpr int kVecs = decltype(vecs)::value;
        const int64_t last = min_of(first + kVecs * kLanes, rows_.count()) - 1;
        const int64_t low = max_of(begin, rows_.seen_from(rows_.begin + first) - tile);
        const int64_t high = min_of(end, rows_.position(rows_.begin + last) + 1 - tile);
        if (low < high) attend_panel<kVecs>(first, tile, low, high, keys, values);
      });
    }
    for_panels([&](int64_t first, auto vecs) {
      constexpr int kWidth = decltype(vecs)::value * kLanes;
      const float* panel = out_ + first * size;
      const int64_t used = min_of(kWidth, rows_.count() - first);
      for (int64_t lane = 0; lane < used; ++lane) {
        float* to = part.out + (first + lane) * size;
        for (int64_t d = 0; d < size; ++d) to[d] = panel[d * kWidth + lane];
        part.max[first + lane] = max_[first + lane];
        part.sum[first + lane] = sum_[first + lane];
      }
    });
  }

 private:
  // Calls body(first row, constant number of vectors) for each panel.
  template <class Body>
  void for_panels(const Body& body) {
    for (int64_t first = 0; first < rows_.count(); first += kPanelLanes) {
      if (rows_.count() - first > kLanes) {
        body(first, std::integral_constant<int, kPanelVecs>{});
      } else {
        body(first, std::integral_constant<int, 1>{});
      }
    }
  }

  static Element convert(T x) {
    if constexpr (Kind::kDepth == 2) {
      return x;
    } else {
      return to_float(x);
    }
  }
  static int64_t position_of(int64_t d, int64_t lane, int64_t width) {
    return d / Kind::kDepth * Kind::kDepth * width + lane * Kind::kDepth + d % Kind::kDepth;
  }

  // The tile's keys as [kTileKeys, D], in the cache where they lie together in the right type, else copied.
  const Element* tile_keys(int64_t tile, int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, Element>) {
      if (blocks_.block_size() >= kTileKeys) return blocks_.key(tile);
    }
    // Whole groups of keys are scored, unseen ones too; their scores are dropped.
    for_runs(round_down(begin, 8), round_up(end, 8), [&](int64_t n, int64_t run) {
      copy(keys_ + n * blocks_.head_size, blocks_.key(tile + n), run * blocks_.head_size);
    });
    return keys_;
  }

  // The tile's values as [kTileKeys, D], or with Pairs [kTileKeys / 2, D, 2].
  const Element* tile_values(int64_t tile, int64_t begin, int64_t end) {
    const int64_t size = blocks_.head_size;
    if constexpr (Kind::kDepth == 1) {
      if constexpr (std::is_same_v<T, Element>) {
        if (blocks_.block_size() >= kTileKeys) return blocks_.value(tile);
      }
      for_runs(begin, end,
               [&](int64_t n, int64_t run) { copy(values_ + n * size, blocks_.value(tile + n), run * size); });
    } else {
      for (int64_t n = round_down(begin, 2); n < end; n += 2) {
        const T* from = blocks_.value(tile + n);
        Element* to = values_ + n * size;
        // What lies beyond the keys in use may be anything; a weight of zero would not hide a NaN.
        if (n >= begin && n + 1 < end) {
          for (int64_t d = 0; d < size; ++d) {
            to[2 * d] = from[d];
            to[2 * d + 1] = from[size + d];
          }
        } else {
          for (int64_t d = 0; d < size; ++d) {
            to[2 * d] = n >= begin ? from[d] : Element{};
            to[2 * d + 1] = n + 1 < end ? from[size + d] : Element{};
          }
        }
      }
    }
    return values_;
  }

  // Calls body(n, run) for runs of keys n … n+run-1 of the tile that lie in one block.
  template <class Body>
  void for_runs(int64_t begin, int64_t end, const Body& body) {
    while (begin < end) {
      const int64_t run_end = min_of(end, round_down(begin, blocks_.block_size()) + blocks_.block_size());
      body(begin, run_end - begin);
      begin = run_end;
    }
  }

  // n is a multiple of eight.
  static void copy(Element* to, const T* from, int64_t n) {
    if constexpr (std::is_same_v<T, Element>) {
      __builtin_memcpy(to, from, n * sizeof(T));
    } else {
      for_lanes(
          n, [&](int64_t i) { store(to + i, load(from + i)); },
          [&](int64_t i, int rest) { store_n(to + i, load_n(from + i, rest), rest); });
    }
  }

  // Keys low … high-1 of the tile for the panel whose first row is `first`.
  template <int kVecs>
  void attend_panel(int64_t first, int64_t tile, int64_t low, int64_t high, const Element* keys,
                    const Element* values) {
    constexpr int kCount = kVecs == 1 ? kBlockOfOne : kBlock;
    constexpr int kWidth = kVecs * kLanes;
    const int64_t size = blocks_.head_size;
    const VecF scale = set1(scale_);
    for (int64_t n = round_down(low, kCount); n < high; n += kCount) {
      score_keys<Kind, kCount, kVecs>(keys + n * size, queries_ + first * size, size, scale,
                                      scores_ + n * kWidth);
    }
    hide<kWidth>(first, tile, low, high);
    const int64_t even = round_down(low, Kind::kDepth);
    weigh<kVecs>(first, low, high, even);
    for (int64_t d = 0; d < size; d += kCount) {
      add_values<Kind, kCount, kVecs>(values + even * size + d * Kind::kDepth, weights_ + even * kWidth,
                                      high - even, size, rescale_, out_ + first * size + d * kWidth);
    }
  }

  // Sets the scores of what a row must not see. Rows ascend in position, so it is a prefix and a suffix of
  // lanes.
  template <int kWidth>
  void hide(int64_t first, int64_t tile, int64_t low, int64_t high) {
    const int64_t base = rows_.begin + first;
    const bool hides_future = tile + high - 1 > rows_.position(base);
    const bool hides_past = rows_.window > 0 && tile + low < rows_.seen_from(base + kWidth - 1);
    if (!hides_future && !hides_past) return;
    for (int64_t n = low; n < high; ++n) {
      // the first token that sees the key, and the first that no longer does
      const int64_t token = tile + n - rows_.first_position;
      const int64_t from = clamp(token * rows_.group - base, 0, kWidth);
      const int64_t to =
          rows_.window > 0 ? clamp((token + rows_.window) * rows_.group - base, 0, kWidth) : kWidth;
      fill(scores_ + n * kWidth, from, -__builtin_inff());
      fill(scores_ + n * kWidth + to, kWidth - to, -__builtin_inff());
    }
  }

  // Turns scores into weights; sets rescale_ to the factors for what was summed before.
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
      return exp2_negative(load(scores_ + n * kWidth + v * kLanes) - greatest[v]);
    };
    if constexpr (Kind::kDepth == 1) {
      for (int64_t n = low; n < high; ++n) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const VecF weight = weight_of(n, v);
          store(scores_ + n * kWidth + v * kLanes, weight);
          sum[v] = sum[v] + weight;
        }
      }
    } else {
      // keys come in pairs; the one that may be missing at either end weighs nothing
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
  float* scores_;     // [kTileKeys, panel lanes]
  Element* weights_;  // the same place, or with Pairs [kTileKeys / 2, panel lanes, 2]
  float* max_;        // [kMaxLanes]
  float* sum_;
  float* rescale_;  // [panel lanes]
  Element* keys_;   // [kTileKeys, D]
  Element* values_;
  Element* queries_;  // panels of [D, lanes]
  float* out_;        // panels of [D, lanes]
};

}  // namespace
}  // namespace ascend_vllm
