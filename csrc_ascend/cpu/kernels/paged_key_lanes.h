// Attention of two to eight bfloat16 query rows with AVX-512, for decoding with groups: keys are transposed,
// so that lanes are keys and scores need no sums over lanes.
//
//     scores[rows, 16 keys] += queries[rows, D / 2, 2] . keys[D / 2, 16 keys, 2]
//     out[rows, 16 depths]  += weights[rows, keys / 2, 2] . values[keys / 2, 16 depths, 2]
//
// With dot products of pairs (AVX512_BF16) pairs of values are interleaved, and weights are rounded to
// bfloat16, as with tiles; numbers of one byte are widened to bfloat16 first, which is exact, and their scales
// are applied to scores and to weights. Without, pairs are split into floats, and values are multiplied one by
// one. Each row has accumulators of its own, so that its result does not depend on the others.
#pragma once

#ifdef __AVX512F__

#include "cpu/kernels/paged_row_weights.h"
#include "cpu/kernels/paged_transpose.h"

namespace ascend_vllm {
namespace {

// T: of the cache, bfloat16 or a byte.
template <class T>
class KeyLanes : private RowWeights<T> {
  using Base = RowWeights<T>;
  using Base::blocks_, Base::fetch_, Base::rows_, Base::scale_, Base::scores_, Base::rescale_,
      Base::key_scales_;
  using Number = std::conditional_t<kHasPairDots, bfloat16, float>;  // of queries and weights
  static constexpr bool kIsWidened = !std::is_same_v<T, bfloat16>;
  static constexpr int64_t kRunKeys = 16;       // blocks are multiples of it
  static constexpr int64_t kUnit = 2 * kLanes;  // depths
  static constexpr int64_t kPanels = 2;         // of 16 transposed keys, at a time
  // Lines that each step of all phases prefetches, so that none has more under way than memory delivers.
  // Measured as below, 4,096 keys of seven rows: 92 to 97% of the time of twice as many while scores are
  // computed and none while keys are transposed; 87% with a head size of 128.
  static constexpr int kLines = sizeof(T);

 public:
  using Fetch = typename Base::Fetch;
  // Whether this reads caches of T at all: without dot products, bytes would be split twice.
  static constexpr bool kReads = kHasPairDots || !kIsWidened;
  // Whether this is for `rows` rows of a sequence: with one of them sums over lanes cost less, and with two
  // where pairs must be split. Measured with two threads of an AMD EPYC (Zen 5): 64 sequences of 80 keys with
  // two rows take 41 us instead of 48.
  static bool takes(int64_t rows, int64_t head_size) {
    return rows > (kHasPairDots ? 1 : 2) && rows <= kMaxDepthRows && head_size % kUnit == 0;
  }
  static constexpr int64_t scratch_floats(int64_t head_size) {
    const int64_t wide = (kPanels * kRunKeys + (kIsWidened ? kTileKeys : 0)) * head_size;
    return Base::scratch_floats(head_size) + kMaxDepthRows * (2 * head_size + kTileKeys) + wide / 2;
  }

  // fetch: of the tiles that follow each tile.
  KeyLanes(const HeadBlocks<T>& blocks, const QueryRows& rows, float scale, float* scratch, const Fetch& fetch)
      : Base(blocks, rows, scale, scratch, fetch),
        size_(blocks.head_size),
        out_(scratch + Base::scratch_floats(size_)),
        queries_(reinterpret_cast<Number*>(out_ + kMaxDepthRows * size_)),
        weights_(queries_ + kMaxDepthRows * size_),
        panels_(reinterpret_cast<bfloat16*>(weights_ + kMaxDepthRows * kTileKeys)),
        wide_(panels_ + kPanels * kRunKeys * size_) {}

  // query(row) is the first element of a row.
  template <class RowOf>
  void load_queries(const RowOf& query) {
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const bfloat16* from = query(rows_.begin + i);
      for (int64_t d = 0; d < size_; d += kLanes) store(queries_ + i * size_ + d, load(from + d));
    }
  }

  // Attends to positions key_begin … key_end-1 that are visible to each row.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    with_rows(rows_.count(), [&](auto rows) { attend_rows<decltype(rows)::value>(key_begin, key_end, part); });
  }

 private:
  // Memory beyond the keys in use may contain NaN, which a weight of zero would not mask.
  alignas(64) static constexpr bfloat16 kZeros[256] = {};

  template <int kRows>
  void attend_rows(int64_t key_begin, int64_t key_end, Part part) {
    fill(out_, kRows * size_, 0.0f);
    fill(part.max, kRows, kNoMax);
    fill(part.sum, kRows, 0.0f);
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      fetch_.start_after(tile);
      Base::load_scales(tile, begin, end);
      for (int64_t n = round_down(begin, kPanels * kRunKeys); n < end; n += kPanels * kRunKeys) {
        transpose(tile, n, begin, end);
        score<kRows>(n);
      }
      Base::template weigh_rows<kRows>(
          tile, begin, end, part, [](VecF t) { return kHasPairDots ? exp2_coarse(t) : exp2_negative(t); },
          [](VecF) {},
          [&](int64_t i, int64_t n, VecF weight) {
            fetch_.template part<kLines>();
            store(weights_ + i * kTileKeys + n, weight);
          });
      if constexpr (kIsWidened) {
        for_runs(begin, end, [&](int64_t n) { widen(blocks_.value(tile + n), wide_ + n * size_); });
      }
      // with four rows or fewer, half as many sums would wait for one another
      int64_t d = 0;
      if constexpr (kRows <= 4) {
        for (; d + 2 * kUnit <= size_; d += 2 * kUnit) add_values<kRows, 2>(d, tile, begin, end);
      }
      for (; d < size_; d += kUnit) add_values<kRows, 1>(d, tile, begin, end);
      fetch_.rest();
    }
    write(part);
  }

  // Calls body(n) for the runs of 16 keys of a tile that have keys begin … end-1; n is the first key of each.
  template <class Body>
  void for_runs(int64_t begin, int64_t end, const Body& body) const {
    for (int64_t n = round_down(begin, kRunKeys); n < end; n += kRunKeys) body(n);
  }

  // 16 keys or values.
  void widen(const T* from, bfloat16* to) const {
    for (int64_t i = 0; i < kRunKeys * size_; i += kLanes) store(to + i, load(from + i));
  }

  // Writes the runs of the tile's keys n … n+31 that have keys begin … end-1 to panels_.
  void transpose(int64_t tile, int64_t n, int64_t begin, int64_t end) {
    for (int64_t panel = 0; panel < kPanels; ++panel) {
      const int64_t first = n + panel * kRunKeys;
      if (first + kRunKeys <= begin || first >= end) continue;
      const bfloat16* keys;
      if constexpr (kIsWidened) {
        widen(blocks_.key(tile + first), wide_);
        keys = wide_;
      } else {
        keys = blocks_.key(tile + first);
      }
      bfloat16* to = panels_ + panel * kRunKeys * size_;
      for (int64_t d = 0; d < size_; d += 8, to += 4 * 2 * kRunKeys) {
        fetch_.template part<kLines>();
        transpose_singles([&](int k) { return keys + k * size_ + d; },
                          [&](int pair, __m512i v) { _mm512_store_si512(to + pair * 2 * kRunKeys, v); });
      }
    }
  }

  // acc + key . query, of a pair of numbers of each of 16 keys.
  [[gnu::always_inline]] static VecF add_pair(VecF acc, PairBF16 keys, const bfloat16* query) {
    return dot_pairs(acc, keys, set1_pair(query));
  }
  [[gnu::always_inline]] static VecF add_pair(VecF acc, PairBF16 keys, const float* query) {
    return fma(set1(query[1]), odd_of_pairs(keys), fma(set1(query[0]), even_of_pairs(keys), acc));
  }

  // The scores of the transposed keys, which begin with key n of the tile.
  template <int kRows>
  void score(int64_t n) {
    VecF acc[kRows][kPanels];
    for (auto& of_row : acc) {
      for (VecF& sum : of_row) sum = set1(0.0f);
    }
    for (int64_t d = 0; d < size_; d += 4) {
      fetch_.template part<kLines>();
#pragma GCC unroll 2
      for (int64_t pair = d; pair < d + 4; pair += 2) {
        PairBF16 keys[kPanels];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) keys[p] = load_pairs(panels_ + (p * size_ + pair) * kRunKeys);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const Number* query = queries_ + i * size_ + pair;
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) acc[i][p] = add_pair(acc[i][p], keys[p], query);
        }
      }
    }
    VecF scales[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      scales[p] = set1(scale_);
      if constexpr (kIsWidened) {
        if (blocks_.key_scales != nullptr) scales[p] = scales[p] * load(key_scales_ + n + p * kRunKeys);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p)
        store(scores_ + i * kTileKeys + n + p * kRunKeys, acc[i][p] * scales[p]);
    }
  }

  // acc[row] += weights[row, 2] . two values, of 16 kVecs depths; see `write` for their order.
  template <int kRows, int kVecs>
  [[gnu::always_inline]] static void add_two(const bfloat16* first, const bfloat16* second,
                                             const bfloat16* weights, VecF (&acc)[kRows][kVecs]) {
    PairBF16 pairs[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v += 2) {
      const __m512i a = _mm512_loadu_si512(first + v * kLanes), b = _mm512_loadu_si512(second + v * kLanes);
      pairs[v] = {_mm512_unpacklo_epi16(a, b)};
      pairs[v + 1] = {_mm512_unpackhi_epi16(a, b)};
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const PairBF16 both = set1_pair(weights + i * kTileKeys);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[i][v] = dot_pairs(acc[i][v], pairs[v], both);
    }
  }
  template <int kRows, int kVecs>
  [[gnu::always_inline]] static void add_two(const bfloat16* first, const bfloat16* second,
                                             const float* weights, VecF (&acc)[kRows][kVecs]) {
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      VecF value[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) value[v] = load((k == 0 ? first : second) + v * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const VecF weight = set1(weights[i * kTileKeys + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) acc[i][v] = fma(weight, value[v], acc[i][v]);
      }
    }
  }

  // Adds to the sums of depths d … d + 32 kUnits - 1.
  template <int kRows, int kUnits>
  void add_values(int64_t d, int64_t tile, int64_t begin, int64_t end) {
    VecF acc[kRows][2 * kUnits];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const VecF factor = set1(rescale_[i]);
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kUnits; ++v) acc[i][v] = load(out_ + i * size_ + d + v * kLanes) * factor;
    }
    for_runs(begin, end, [&](int64_t n) {
      const bfloat16* values;
      if constexpr (kIsWidened) {
        values = wide_ + n * size_;
      } else {
        values = blocks_.value(tile + n);
      }
      const Number* weights = weights_ + n;
      const bool is_whole = n >= begin && n + kRunKeys <= end;
      for (int64_t k = 0; k < kRunKeys; k += 2) {
        fetch_.template part<kLines>();
        const bfloat16 *first = values + k * size_ + d, *second = first + size_;
        if (!is_whole) {
          if (n + k < begin || n + k >= end) first = kZeros;
          if (n + k + 1 < begin || n + k + 1 >= end) second = kZeros;
        }
        add_two(first, second, weights + k, acc);
      }
    });
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kUnits; ++v) store(out_ + i * size_ + d + v * kLanes, acc[i][v]);
    }
  }

  // With pairs, of two vectors of 32 depths the first has 8 l … 8 l + 3 in its lanes 4 l … 4 l + 3, the second
  // the others.
  void write(Part part) const {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t i = 0; i < rows_.count() * size_; i += kUnit) {
      __m512i first = _mm512_loadu_si512(out_ + i), second = _mm512_loadu_si512(out_ + i + kLanes);
      if constexpr (kHasPairDots) {
        const __m512i both = first;
        first = _mm512_permutex2var_epi64(both, low, second);
        second = _mm512_permutex2var_epi64(both, high, second);
      }
      _mm512_storeu_si512(part.out + i, first);
      _mm512_storeu_si512(part.out + i + kLanes, second);
    }
  }

  const int64_t size_;
  float* const out_;        // [8, D], in the order of `write`
  Number* const queries_;   // [8, D]
  Number* const weights_;   // [8, kTileKeys]
  bfloat16* const panels_;  // [2, D / 2, 16 keys, 2]
  bfloat16* const wide_;    // [kTileKeys, D], of bytes
};

}  // namespace
}  // namespace ascend_vllm

#endif
