// As paged_depth_lanes.h, for AVX2, of whose vectors two are a unit of 16 numbers of the head: up to eight
// query rows share what a key or a value costs to read and to widen.
//
// Each half of a bfloat16 pair becomes a float by one operation, so a unit has its even numbers first and then
// its odd ones; queries and sums are kept in that order. For four rows or more, keys of bfloat16 are
// transposed, pair by pair, so that lanes are keys, and scores need no sums over lanes.
#pragma once

#if defined(__AVX2__) && !defined(__AVX512F__)

#include "cpu/kernels/paged_depth_lanes.h"

namespace ascend_vllm {
namespace {

constexpr int64_t kUnit = 2 * kLanes;

struct Unit {
  VecF first, second;
};
template <class T>
inline Unit load_unit(const T* p) {
  return {load(p), load(p + kLanes)};
}
inline Unit load_unit(const bfloat16* p) {
  const PairBF16 pairs = load_pairs(p);
  return {even_of_pairs(pairs), odd_of_pairs(pairs)};
}
// Of the first n numbers; zeros behind them.
template <class T>
inline Unit load_unit_n(const T* p, int64_t n) {
  T buffer[kUnit] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load_unit(buffer);
}

constexpr int64_t kPanelKeys = 2 * kLanes;       // of a panel of transposed keys
constexpr int64_t kTransposed = 2 * kPanelKeys;  // keys that are transposed at a time

// Transposes eight keys of sixteen numbers, `stride` numbers apart, to pairs [8][16 keys], of which these are
// eight.
inline void transpose_unit(const bfloat16* keys, int64_t stride, bfloat16* to) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, keys += kLanes, to += 4 * 2 * kPanelKeys) {
    const auto both = [&](int k) {
      const auto at = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + i * stride));
      };
      return _mm256_inserti128_si256(_mm256_castsi128_si256(at(k)), at(k + 4), 1);
    };
    const __m256i key0 = both(0), key1 = both(1), key2 = both(2), key3 = both(3);
    const __m256i low01 = _mm256_unpacklo_epi32(key0, key1), high01 = _mm256_unpackhi_epi32(key0, key1);
    const __m256i low23 = _mm256_unpacklo_epi32(key2, key3), high23 = _mm256_unpackhi_epi32(key2, key3);
    const auto put = [&](int pair, __m256i v) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + pair * 2 * kPanelKeys), v);
    };
    put(0, _mm256_unpacklo_epi64(low01, low23));
    put(1, _mm256_unpackhi_epi64(low01, low23));
    put(2, _mm256_unpacklo_epi64(high01, high23));
    put(3, _mm256_unpackhi_epi64(high01, high23));
  }
}

// T: of the cache.
template <class T>
class DepthPairs : private DepthLanes<T> {
  using Base = DepthLanes<T>;
  using Base::blocks_, Base::key_scales_, Base::rows_, Base::scale_, Base::scores_, Base::value_scales_;

 public:
  static constexpr int64_t kMostRows = 8;
  static constexpr int64_t scratch_floats(int64_t head_size) {
    return (2 * kMostRows + kTransposed / 2) * round_up(head_size, kUnit) + kMostRows * kTileKeys;
  }

  DepthPairs(const HeadBlocks<T>& blocks, const QueryRows& rows, float scale, float* scratch)
      : Base(blocks, rows, scale, scratch),
        stride_(round_up(blocks.head_size, kUnit)),
        queries_(scratch + kMostRows * kTileKeys),
        out_(queries_ + kMostRows * stride_),
        panels_(reinterpret_cast<bfloat16*>(out_ + kMostRows * stride_)) {}

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const auto* from = query(rows_.begin + i);
      float* to = queries_ + i * stride_;
      fill(to, stride_, 0.0f);
      for (int64_t d = 0; d < blocks_.head_size; ++d) to[transposes() ? d : place_of(d)] = to_float(from[d]);
    }
  }

  // Attends to positions key_begin … key_end-1 that are visible to each row.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    fill(out_, rows_.count() * stride_, 0.0f);
    fill(part.max, rows_.count(), kNoMax);
    fill(part.sum, rows_.count(), 0.0f);
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      if (transposes()) {
        for (int64_t n = round_down(begin, kTransposed); n < end; n += kTransposed) {
          transpose(tile + n, max_of(begin - n, 0), min_of(end - n, kTransposed));
          for_rows([&]<int kRows>(int64_t row) { score_panels<kRows>(row, tile, n, key_end); });
        }
      } else {
        for_rows([&]<int kRows>(int64_t row) { score<kRows>(row, tile, begin, end, key_end); });
      }
      Base::load_scales(tile, begin, end);
      weigh_rows(tile, begin, end, part);
      for_rows([&]<int kRows>(int64_t row) { add_values<kRows>(row, tile, begin, end, key_end); });
    }
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const float* from = out_ + i * stride_;
      float* to = part.out + i * blocks_.head_size;
      for (int64_t d = 0; d < blocks_.head_size; ++d) to[d] = from[place_of(d)];
    }
  }

 private:
  static constexpr int64_t kRunKeys = 16;  // blocks are multiples of it
  // Sums of several rows and keys, or of several rows and vectors of values, that fit the registers.
  template <int kRows>
  static constexpr int kKeys = kRows >= 4   ? 2
                               : kRows == 2 ? 4
                                            : 8;
  template <int kRows>
  static constexpr int kUnits = kRows >= 4   ? 1
                                : kRows == 2 ? 2
                                             : 4;

  // As `weigh`, of all rows, none of which waits for another. Sets rescale_.
  void weigh_rows(int64_t tile, int64_t begin, int64_t end, Part part) {
    const int64_t rows = rows_.count();
    const int64_t first = round_down(begin, kLanes), last = round_up(end, kLanes);
    alignas(64) float greatest[kPlaces] = {}, before[kPlaces] = {};
    for (int64_t i = 0; i < rows; ++i) {
      float* scores = scores_ + i * kTileKeys;
      if (blocks_.key_scales != nullptr) Base::multiply(scores, key_scales_, first, last);
      Base::finish_scores(i, tile, begin, end);
      VecF top = set1(part.max[i]);
      for (int64_t n = first; n < last; n += kLanes) top = max(top, load(scores + n));
      before[i] = part.max[i];
      part.max[i] = greatest[i] = reduce_max(top);
    }
    for (int64_t i = 0; i < kPlaces; i += kLanes) {
      store(rescale_ + i, exp2_negative(load(before + i) - load(greatest + i)));
    }
    for (int64_t i = 0; i < rows; ++i) {
      float* scores = scores_ + i * kTileKeys;
      const VecF shift = set1(greatest[i]);
      VecF sum = set1(0.0f);
      for (int64_t n = first; n < last; n += kLanes) {
        VecF weight = exp2_negative(load(scores + n) - shift);
        sum = sum + weight;
        if (blocks_.value_scales != nullptr) weight = weight * load(value_scales_ + n);
        store(scores + n, weight);
      }
      part.sum[i] = part.sum[i] * rescale_[i] + reduce_add(sum);
    }
  }

  static int64_t place_of(int64_t d) {
    if constexpr (!std::is_same_v<T, bfloat16>) return d;
    return d / kUnit * kUnit + d % 2 * kLanes + d % kUnit / 2;
  }

  // Calls body<rows>(first row): with four sums or fewer, multiply-adds would wait for one another.
  template <class Body>
  void for_rows(const Body& body) const {
    int64_t row = 0, rest = rows_.count();
    const auto take = [&]<int kRows>() {
      body.template operator()<kRows>(row);
      row += kRows;
      rest -= kRows;
    };
    if (rest == 5 || rest == 7) take.template operator()<5>();
    while (rest >= 4) take.template operator()<4>();
    if (rest >= 2) take.template operator()<2>();
    if (rest == 1) take.template operator()<1>();
  }

  bool transposes() const { return std::is_same_v<T, bfloat16> && rows_.count() >= 4; }

  // Where a run of 16 keys or values of the next tile is, which corresponds to that at `position`: the first
  // rows prefetch it a line at a time, since loads wait behind a burst of prefetches. For other rows, or if
  // there is none: memory that is in the cache.
  const T* next_run(const T* cache, int64_t row, int64_t position, int64_t key_end) const {
    const int64_t next = position + kTileKeys;
    return row == 0 && next < key_end ? cache + blocks_.offset(next) : reinterpret_cast<const T*>(scores_);
  }

  // Writes keys begin … end-1 of those at `position` to panels_.
  void transpose([[maybe_unused]] int64_t position, [[maybe_unused]] int64_t begin,
                 [[maybe_unused]] int64_t end) {
    if constexpr (std::is_same_v<T, bfloat16>) {
      const int64_t size = blocks_.head_size, whole = round_down(size, kUnit);
      for (int64_t n = round_down(begin, kLanes); n < end; n += kLanes) {
        const bfloat16* keys = blocks_.key(position + n);
        bfloat16* to = panels_ + n / kPanelKeys * kPanelKeys * stride_ + n % kPanelKeys * 2;
        for (int64_t d = 0; d < whole; d += kUnit) transpose_unit(keys + d, size, to + d * kPanelKeys);
        if (whole == size) continue;
        bfloat16 rest[kLanes * kUnit] = {};
        for (int64_t k = 0; k < kLanes; ++k) {
          std::memcpy(rest + k * kUnit, keys + k * size + whole, (size - whole) * sizeof(bfloat16));
        }
        transpose_unit(rest, kUnit, to + whole * kPanelKeys);
      }
    }
  }

  // The scores of the transposed keys, which begin with key n of the tile.
  template <int kRows>
  void score_panels(int64_t row, int64_t tile, int64_t n, int64_t key_end) {
    constexpr int kPanels = kRows >= 4 ? 1 : 2;
    const VecF scale = set1(scale_);
    for (int64_t k = 0; k < kTransposed; k += kPanels * kPanelKeys) {
      const bfloat16* panels = panels_ + k * stride_;
      const float* queries = queries_ + row * stride_;
      VecF acc[kRows][2 * kPanels];
      for (auto& of_row : acc) {
        for (VecF& sum : of_row) sum = set1(0.0f);
      }
      const auto columns = [&](int64_t d, int v) {
        return load_pairs(panels + v / 2 * kPanelKeys * stride_ + d * kPanelKeys + v % 2 * 2 * kLanes);
      };
      const T* ahead = next_run(blocks_.keys, row, tile + n + k, key_end);
      for (int64_t d = 0; d < stride_; d += 2) {
        __builtin_prefetch(ahead + d * kRunKeys);
        const auto multiply = [&](int step) __attribute__((always_inline)) {
          VecF column[2 * kPanels];
#pragma GCC unroll 8
          for (int v = 0; v < 2 * kPanels; ++v) {
            column[v] = step == 0 ? even_of_pairs(columns(d, v)) : odd_of_pairs(columns(d, v));
          }
#pragma GCC unroll 8
          for (int i = 0; i < kRows; ++i) {
            const VecF query = set1(queries[i * stride_ + d + step]);
#pragma GCC unroll 8
            for (int v = 0; v < 2 * kPanels; ++v) acc[i][v] = fma(query, column[v], acc[i][v]);
          }
        };
        multiply(0);
        multiply(1);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * kPanels; ++v) {
          store(scores_ + (row + i) * kTileKeys + n + k + v * kLanes, acc[i][v] * scale);
        }
      }
    }
  }

  template <int kRows>
  void score(int64_t row, int64_t tile, int64_t begin, int64_t end, int64_t key_end) {
    constexpr int kCount = kKeys<kRows>;
    for (int64_t n = round_down(begin, kCount); n < end; n += kCount) {
      if (row == 0 && tile + n + kTileKeys < key_end) {
        blocks_.prefetch(blocks_.keys, tile + n + kTileKeys, kCount);
      }
      score_keys<kRows, kCount>(blocks_.key(tile + n), row, n);
    }
  }

  template <int kRows, int kCount>
  void score_keys(const T* keys, int64_t row, int64_t n) {
    const int64_t size = blocks_.head_size, whole = round_down(size, kUnit);
    const float* queries = queries_ + row * stride_;
    VecF acc[kRows][kCount];
    for (auto& of_row : acc) {
      for (VecF& sum : of_row) sum = set1(0.0f);
    }
    const auto add = [&](int64_t d, const auto& unit_of) __attribute__((always_inline)) {
      if constexpr (kRows > kCount) {
        Unit key[kCount];
#pragma GCC unroll 8
        for (int k = 0; k < kCount; ++k) key[k] = unit_of(keys + k * size + d);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const VecF query = load(queries + i * stride_ + d);
#pragma GCC unroll 8
          for (int k = 0; k < kCount; ++k) acc[i][k] = fma(query, key[k].first, acc[i][k]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const VecF query = load(queries + i * stride_ + d + kLanes);
#pragma GCC unroll 8
          for (int k = 0; k < kCount; ++k) acc[i][k] = fma(query, key[k].second, acc[i][k]);
        }
      } else {
        Unit query[kRows];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          query[i] = {load(queries + i * stride_ + d), load(queries + i * stride_ + d + kLanes)};
        }
#pragma GCC unroll 8
        for (int k = 0; k < kCount; ++k) {
          const Unit key = unit_of(keys + k * size + d);
#pragma GCC unroll 8
          for (int i = 0; i < kRows; ++i) {
            acc[i][k] = fma(query[i].first, key.first, acc[i][k]);
            acc[i][k] = fma(query[i].second, key.second, acc[i][k]);
          }
        }
      }
    };
    for (int64_t d = 0; d < whole; d += kUnit) add(d, [](const T* p) { return load_unit(p); });
    if (whole < size) add(whole, [&](const T* p) { return load_unit_n(p, size - whole); });
    float* scores = scores_ + row * kTileKeys + n;
    if constexpr (kCount == 2) {
      for (int i = 0; i < kRows; i += 2) {
        const int j = i + 1 < kRows ? i + 1 : i;
        float sums[4];
        store_sums(acc[i][0], acc[i][1], acc[j][0], acc[j][1], scale_, sums);
        std::memcpy(scores + i * kTileKeys, sums, 2 * sizeof(float));
        std::memcpy(scores + j * kTileKeys, sums + 2, 2 * sizeof(float));
      }
    } else {
      for (int i = 0; i < kRows; ++i) {
        for (int k = 0; k < kCount; k += 4) {
          store_sums(acc[i][k], acc[i][k + 1], acc[i][k + 2], acc[i][k + 3], scale_,
                     scores + i * kTileKeys + k);
        }
      }
    }
  }

  // to[4] = the sums of the lanes of four vectors, times a factor.
  static void store_sums(VecF a, VecF b, VecF c, VecF d, float factor, float* to) {
    // not horizontal additions, which are microcode on some processors
    const VecF ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    const VecF cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
    const VecF all = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    _mm_storeu_ps(to, _mm_mul_ps(sums, _mm_set1_ps(factor)));
  }

  template <int kRows>
  void add_values(int64_t row, int64_t tile, int64_t begin, int64_t end, int64_t key_end) {
    constexpr int kCount = kUnits<kRows>;
    const int64_t whole = round_down(blocks_.head_size, kUnit);
    int64_t d = 0;
    for (; d + kCount * kUnit <= whole; d += kCount * kUnit) {
      add_columns<kRows, kCount>(row, d, tile, begin, end, key_end, [](const T* p) { return load_unit(p); });
    }
    for (; d < whole; d += kUnit) {
      add_columns<kRows, 1>(row, d, tile, begin, end, key_end, [](const T* p) { return load_unit(p); });
    }
    const int64_t rest = blocks_.head_size - whole;
    if (rest > 0) {
      add_columns<kRows, 1>(row, d, tile, begin, end, key_end,
                            [&](const T* p) { return load_unit_n(p, rest); });
    }
  }

  // out_[rows][d … d + 16 * kCount) = out_ * rescale + weights * values.
  template <int kRows, int kCount, class UnitOf>
  void add_columns(int64_t row, int64_t d, int64_t tile, int64_t begin, int64_t end, int64_t key_end,
                   const UnitOf& unit_of) {
    const int64_t size = blocks_.head_size;
    float* out = out_ + row * stride_ + d;
    const float* weights = scores_ + row * kTileKeys;
    Unit acc[kRows][kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const VecF factor = set1(rescale_[row + i]);
#pragma GCC unroll 8
      for (int u = 0; u < kCount; ++u) {
        const float* from = out + i * stride_ + u * kUnit;
        acc[i][u] = {load(from) * factor, load(from + kLanes) * factor};
      }
    }
    for (int64_t first = begin, stop; first < end; first = stop) {
      stop = min_of(end, round_down(first, kRunKeys) + kRunKeys);
      const T* values = blocks_.value(tile + first) + d;
      const T* ahead = next_run(blocks_.values, row, tile + first, key_end) + kRunKeys * d;
      const float* weight_of = weights + first;
#pragma GCC unroll 4
      for (int64_t n = 0; n < stop - first; ++n) {
        __builtin_prefetch(ahead + n * kCount * kUnit);
        Unit value[kCount];
#pragma GCC unroll 8
        for (int u = 0; u < kCount; ++u) value[u] = unit_of(values + n * size + u * kUnit);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const VecF weight = set1(weight_of[i * kTileKeys + n]);
#pragma GCC unroll 8
          for (int u = 0; u < kCount; ++u) {
            acc[i][u].first = fma(weight, value[u].first, acc[i][u].first);
            acc[i][u].second = fma(weight, value[u].second, acc[i][u].second);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int u = 0; u < kCount; ++u) {
        float* to = out + i * stride_ + u * kUnit;
        store(to, acc[i][u].first);
        store(to + kLanes, acc[i][u].second);
      }
    }
  }

  const int64_t stride_;
  float* const queries_;    // [8, D], of whole units
  float* const out_;        // the same
  bfloat16* const panels_;  // [2, D / 2, 16 keys, 2]
  float rescale_[kPlaces];
};

}  // namespace
}  // namespace ascend_vllm

#endif
