// Attention of few query rows, with vector lanes along the head: each key is read once and multiplied with
// every query, and each dot product ends in a sum over lanes. For decoding with small groups;
// paged_query_lanes.h is for more rows.
//
// Keys and values of one byte are widened in registers. Their scales, if each has its own, are applied to
// scores and to weights, which are fewer than numbers.
#pragma once

#include "cpu/kernels/paged_fetch.h"

namespace ascend_vllm {
namespace {

// With more rows, lanes along the queries are faster: unused lanes cost less than the sums over lanes.
constexpr int kMaxDepthRows = kLanes < 8 ? 2 : 8;
// Of these rows, in whole vectors.
constexpr int kPlaces = kMaxDepthRows < kLanes ? kLanes : kMaxDepthRows;

// Calls body(constant number of rows) for two to eight rows.
template <class Body>
inline void with_rows(int64_t rows, const Body& body) {
  switch (rows) {
    case 2:
      return body(std::integral_constant<int, 2>{});
    case 3:
      return body(std::integral_constant<int, 3>{});
    case 4:
      return body(std::integral_constant<int, 4>{});
    case 5:
      return body(std::integral_constant<int, 5>{});
    case 6:
      return body(std::integral_constant<int, 6>{});
    case 7:
      return body(std::integral_constant<int, 7>{});
    default:
      return body(std::integral_constant<int, 8>{});
  }
}

// Elements per lane of a product, and the type of the stored queries.
struct SingleDepths {
  using Query = float;
  static constexpr int kDepth = 1;
  template <class T>
  static VecF lanes(const T* p) {
    return load(p);
  }
  template <class T>
  static VecF lanes_n(const T* p, int n) {
    return load_n(p, n);
  }
  static VecF multiply_add(VecF acc, VecF a, VecF b) { return fma(a, b, acc); }
};
struct PairDepths {
  using Query = bfloat16;
  static constexpr int kDepth = 2;
  static PairBF16 lanes(const bfloat16* p) { return load_pairs(p); }
  static PairBF16 lanes_n(const bfloat16* p, int n) { return load_pairs_n(p, n); }
  static VecF multiply_add(VecF acc, PairBF16 a, PairBF16 b) { return dot_pairs(acc, a, b); }
};

// T: of the cache.
template <class T>
class DepthLanes {
  using Kind = std::conditional_t<kPairsArePreferred && std::is_same_v<T, bfloat16>, PairDepths, SingleDepths>;
  using Query = typename Kind::Query;
  // Query rows whose accumulators fit the registers together with four keys or four vectors of values.
  static constexpr int kRows = kLanes == 16 ? 4 : 2;
  static constexpr int kKeys = 4;

 public:
  using Fetch = TileFetch<T, 3>;
  static constexpr int64_t scratch_floats(int64_t head_size) { return kMaxDepthRows * (head_size + kTileKeys); }

  // fetch: of the tiles that follow each tile.
  DepthLanes(const HeadBlocks<T>& blocks, const QueryRows& rows, float scale, float* scratch,
             const Fetch& fetch = {})
      : blocks_(blocks),
        rows_(rows),
        scale_(scale),
        fetch_(fetch),
        scores_(scratch),
        queries_(reinterpret_cast<Query*>(scratch + kMaxDepthRows * kTileKeys)) {
    for (int64_t i = 0; i < rows.count(); ++i) {
      seen_from_[i] = rows.seen_from(rows.begin + i);
      seen_to_[i] = rows.position(rows.begin + i) + 1;
    }
    for (int64_t i = 0; i < rows.count(); ++i) {
      all_from_ = max_of(all_from_, seen_from_[i]);
      all_to_ = min_of(all_to_, seen_to_[i]);
    }
  }

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    const int64_t size = blocks_.head_size;
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const auto* from = query(rows_.begin + i);
      Query* to = queries_ + i * size;
      for (int64_t d = 0; d < size; ++d) to[d] = convert(from[d]);
    }
  }

  // Attends to positions key_begin … key_end-1 that are visible to each row.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    fill(part.out, rows_.count() * blocks_.head_size, 0.0f);
    fill(part.max, rows_.count(), kNoMax);
    fill(part.sum, rows_.count(), 0.0f);
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      fetch_.start_after(tile);
      score(tile, begin, end);
      load_scales(tile, begin, end);
      float rescale[kMaxDepthRows];
      for (int64_t i = 0; i < rows_.count(); ++i) rescale[i] = weigh(i, tile, begin, end, part);
      add_values(tile, begin, end, rescale, part.out);
      fetch_.rest();
    }
  }

 protected:
  template <class Given>
  static Query convert(Given x) {
    if constexpr (std::is_same_v<Given, Query>) {
      return x;
    } else {
      return to_float(x);
    }
  }

  void score(int64_t tile, int64_t begin, int64_t end) {
    const int64_t lines = kKeys * lines_of_key();
    for (int64_t n = round_down(begin, kKeys); n < end; n += kKeys) {
      fetch_.some(lines);
      const T* keys = blocks_.key(tile + n);
      int64_t i = 0;
      for (; i + kRows <= rows_.count(); i += kRows) score_keys<kRows>(keys, i, n);
      switch (rows_.count() - i) {
        case 1:
          score_keys<1>(keys, i, n);
          break;
        case 2:
          score_keys<2>(keys, i, n);
          break;
        case 3:
          score_keys<3>(keys, i, n);
          break;
      }
    }
  }

  // Cache lines that a key fills.
  int64_t lines_of_key() const { return (blocks_.head_size * static_cast<int64_t>(sizeof(T)) + 63) / 64; }

  template <int kCount>
  void score_keys(const T* keys, int64_t row, int64_t n) {
    constexpr int kStep = kLanes * Kind::kDepth;
    const int64_t size = blocks_.head_size;
    const Query* queries = queries_ + row * size;
    VecF acc[kKeys][kCount];
    for (auto& of_key : acc) {
      for (VecF& sum : of_key) sum = set1(0.0f);
    }
    int64_t d = 0;
    for (; d + kStep <= size; d += kStep) {
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) {
        const auto key = Kind::lanes(keys + k * size + d);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          acc[k][i] = Kind::multiply_add(acc[k][i], key, Kind::lanes(queries + i * size + d));
        }
      }
    }
    if (d < size) {
      const int rest = static_cast<int>(size - d);
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) {
        const auto key = Kind::lanes_n(keys + k * size + d, rest);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          acc[k][i] = Kind::multiply_add(acc[k][i], key, Kind::lanes_n(queries + i * size + d, rest));
        }
      }
    }
    for (int i = 0; i < kCount; ++i) {
      for (int k = 0; k < kKeys; ++k) scores_[(row + i) * kTileKeys + n + k] = reduce_add(acc[k][i]) * scale_;
    }
  }

  // The scales of keys begin … end-1 of the tile and of its values; 1 for the others of the vectors they are
  // in.
  void load_scales(int64_t tile, int64_t begin, int64_t end) {
    if (blocks_.key_scales == nullptr) return;
    const int64_t first = round_down(begin, kLanes), last = round_up(end, kLanes);
    for (float* scales : {key_scales_, value_scales_}) {
      fill(scales + first, begin - first, 1.0f);
      fill(scales + end, last - end, 1.0f);
    }
    blocks_.load_scales(blocks_.key_scales, tile + begin, tile + end, key_scales_ + begin);
    blocks_.load_scales(blocks_.value_scales, tile + begin, tile + end, value_scales_ + begin);
  }

  static void multiply(float* numbers, const float* factors, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n += kLanes) store(numbers + n, load(numbers + n) * load(factors + n));
  }

  // Whether `finish_scores` would change nothing: all rows see all keys of a whole tile.
  bool sees_all(int64_t tile, int64_t begin, int64_t end) const {
    return begin == 0 && end == kTileKeys && all_from_ <= tile && tile + kTileKeys <= all_to_ &&
           !rows_.changes_scores();
  }

  // Applies to the scores of one row all that changes them but scales, and hides those of keys that it does not
  // see.
  void finish_scores(int64_t i, int64_t tile, int64_t begin, int64_t end) {
    float* scores = scores_ + i * kTileKeys;
    const int64_t first = round_down(begin, kLanes), last = round_up(end, kLanes);
    const int64_t low = clamp(seen_from_[i] - tile, begin, end);
    const int64_t high = clamp(seen_to_[i] - tile, low, end);
    if (rows_.changes_scores()) change_scores(rows_.begin + i, tile, first, last, scores);
    fill(scores + first, low - first, -__builtin_inff());
    fill(scores + high, last - high, -__builtin_inff());
  }

  // Turns the scores of one row into weights; returns the factor for the earlier sums.
  float weigh(int64_t i, int64_t tile, int64_t begin, int64_t end, Part part) {
    float* scores = scores_ + i * kTileKeys;
    const int64_t first = round_down(begin, kLanes), last = round_up(end, kLanes);
    if (blocks_.key_scales != nullptr) multiply(scores, key_scales_, first, last);
    finish_scores(i, tile, begin, end);
    VecF greatest = set1(part.max[i]);
    for (int64_t n = first; n < last; n += kLanes) greatest = max(greatest, load(scores + n));
    const float new_max = reduce_max(greatest);
    const VecF shift = set1(new_max);
    VecF sum = set1(0.0f);
    for (int64_t n = first; n < last; n += kLanes) {
      const VecF weight = exp2_negative(load(scores + n) - shift);
      store(scores + n, weight);
      sum = sum + weight;
    }
    if (blocks_.value_scales != nullptr) multiply(scores, value_scales_, first, last);
    const float rescale = part.max[i] == new_max ? 1.0f : exp2_negative(part.max[i] - new_max);
    part.max[i] = new_max;
    part.sum[i] = part.sum[i] * rescale + reduce_add(sum);
    return rescale;
  }

  // Soft cap and ALiBi of one row, for keys first … last-1 of the tile, which are whole vectors.
  void change_scores(int64_t row, int64_t tile, int64_t first, int64_t last, float* scores) const {
    static constexpr float kLaneNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const VecF slope = set1(rows_.slope(row));
    for (int64_t n = first; n < last; n += kLanes) {
      const VecF distance = set1(static_cast<float>(tile + n - rows_.position(row))) + load(kLaneNumbers);
      store(scores + n, changed_scores(load(scores + n), rows_.soft_cap, slope, distance));
    }
  }

  void add_values(int64_t tile, int64_t begin, int64_t end, const float* rescale, float* out) {
    int64_t i = 0;
    for (; i + kRows <= rows_.count(); i += kRows) add_rows<kRows>(i, tile, begin, end, rescale, out);
    switch (rows_.count() - i) {
      case 1:
        return add_rows<1>(i, tile, begin, end, rescale, out);
      case 2:
        return add_rows<2>(i, tile, begin, end, rescale, out);
      case 3:
        return add_rows<3>(i, tile, begin, end, rescale, out);
    }
  }

  template <int kCount>
  void add_rows(int64_t row, int64_t tile, int64_t begin, int64_t end, const float* rescale, float* out) {
    const int64_t size = blocks_.head_size;
    int64_t d = 0;
    for (; d + 4 * kLanes <= size; d += 4 * kLanes) {
      add_columns<kCount, 4, false>(row, d, tile, begin, end, rescale, out);
    }
    for (; d + kLanes <= size; d += kLanes) {
      add_columns<kCount, 1, false>(row, d, tile, begin, end, rescale, out);
    }
    if (d < size) add_columns<kCount, 1, true>(row, d, tile, begin, end, rescale, out);
  }

  // out[row … row+kCount) [d … d + kVecs * kLanes) = out * rescale + weights * values; kTail: only up to the
  // head size.
  template <int kCount, int kVecs, bool kTail>
  void add_columns(int64_t row, int64_t d, int64_t tile, int64_t begin, int64_t end, const float* rescale,
                   float* out) {
    const int64_t size = blocks_.head_size;
    const int rest = static_cast<int>(size - d);
    const auto load_some = [rest](const auto* p) {
      if constexpr (kTail) {
        return load_n(p, rest);
      } else {
        return load(p);
      }
    };
    out += row * size + d;
    const float* weights = scores_ + row * kTileKeys;
    VecF acc[kCount][kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      const VecF factor = set1(rescale[row + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[i][v] = load_some(out + i * size + v * kLanes) * factor;
    }
    const int64_t lines = lines_of_key();
    for (int64_t n = begin; n < end;) {
      const int64_t run_end = min_of(end, round_down(n, blocks_.block_size()) + blocks_.block_size());
      const T* values = blocks_.value(tile + n) + d;
      for (; n < run_end; ++n, values += size) {
        fetch_.some(lines);
        VecF value[kVecs];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) value[v] = load_some(values + v * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          const VecF weight = set1(weights[i * kTileKeys + n]);
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) acc[i][v] = fma(weight, value[v], acc[i][v]);
        }
      }
    }
    for (int i = 0; i < kCount; ++i) {
      for (int v = 0; v < kVecs; ++v) {
        if constexpr (kTail) {
          store_n(out + i * size, acc[i][v], rest);
        } else {
          store(out + i * size + v * kLanes, acc[i][v]);
        }
      }
    }
  }

  const HeadBlocks<T>& blocks_;
  const QueryRows& rows_;
  const float scale_;
  Fetch fetch_;
  float* const scores_;   // [kMaxDepthRows, kTileKeys]: scores, then weights
  Query* const queries_;  // [kMaxDepthRows, D]
  int64_t seen_from_[kMaxDepthRows], seen_to_[kMaxDepthRows];  // positions that each row sees, without the last
  int64_t all_from_ = 0, all_to_ = INT64_MAX;                  // that all rows see
  float key_scales_[kTileKeys];
  float value_scales_[kTileKeys];
};

}  // namespace
}  // namespace ascend_vllm
