// Attention of three to eight query rows to an int8 cache with dot products of bytes (AVX512_VNNI), for
// decoding with groups: as paged_key_lanes.h, with four numbers in a lane instead of two.
//
//     scores[rows, 16 keys] += queries[rows, D / 4, 4] . keys[D / 4, 16 keys, 4]
//     out[rows, 16 depths]  += weights[rows, keys / 4, 4] . values[keys / 4, 16 depths, 4]
//
// One factor of these products has no sign: weights have none, and keys are read as numbers that are 128 too
// large, for which 128 times the sum of the queries is taken off.
#pragma once

#ifdef __AVX512VNNI__

#include "cpu/kernels/paged_byte_rows.h"
#include "cpu/kernels/paged_transpose.h"

namespace ascend_vllm {
namespace {

class ByteLanes : public ByteRows {
  static constexpr int64_t kRunKeys = 16;  // blocks are multiples of it
  static constexpr int64_t kBytes = 64;    // of a vector
  // With at most so many rows each query or weight that is loaded multiplies two vectors: of each row and
  // vector there are two sums, and no more of them fit the 32 registers.
  static constexpr int kMostShared = 7;

 public:
  using DepthLanes<int8_t>::Fetch;
  // Whether this is for `rows` rows of a sequence: with one or two of them sums over lanes cost less.
  static bool takes(int64_t rows, int64_t head_size) {
    return rows > 2 && rows <= kMaxDepthRows && supports(head_size);
  }
  static constexpr int64_t scratch_floats(int64_t head_size) {
    return DepthLanes<int8_t>::scratch_floats(head_size) + kMaxDepthRows * head_size +
           2 * kRunKeys * head_size / 4;
  }

  // fetch: of the tiles that follow each tile.
  ByteLanes(const HeadBlocks<int8_t>& blocks, const QueryRows& rows, float scale, float* scratch,
            const Fetch& fetch)
      : ByteRows(blocks, rows, scale, scratch, fetch),
        size_(blocks.head_size),
        out_(scratch + DepthLanes<int8_t>::scratch_floats(size_)),
        panel_(reinterpret_cast<int8_t*>(out_ + kMaxDepthRows * size_)) {}

  // Attends to positions key_begin … key_end-1 that are visible to each row.
  void attend(int64_t key_begin, int64_t key_end, Part part) {
    with_rows(rows_.count(), [&](auto rows) { attend_rows<decltype(rows)::value>(key_begin, key_end, part); });
  }

 private:
  template <int kRows>
  void attend_rows(int64_t key_begin, int64_t key_end, Part part) {
    fill(out_, kRows * size_, 0.0f);
    fill(part.max, kRows, kNoMax);
    fill(part.sum, kRows, 0.0f);
    for (int64_t tile = round_down(key_begin, kTileKeys); tile < key_end; tile += kTileKeys) {
      const int64_t begin = max_of(key_begin - tile, 0), end = min_of(key_end - tile, kTileKeys);
      fetch_.start_after(tile);
      int64_t n = round_down(begin, kRunKeys);
      if constexpr (kRows <= kMostShared) {
        for (; n + kRunKeys < end; n += 2 * kRunKeys) score<kRows, 2>(tile, n);
      }
      for (; n < end; n += kRunKeys) score<kRows, 1>(tile, n);
      const float greatest_scale = load_value_scales(tile, begin, end);
      weigh_rows<kRows>(
          tile, begin, end, part, [](VecF t) { return exp2_coarse(t); },
          [&](VecF powers) { set_steps(powers * set1(greatest_scale)); },
          [&](int64_t i, int64_t n, VecF weight) { store_weight(i, n, weight); });
      for (int64_t d = 0; d < size_; d += kDepths) {
        interleave_values(d, tile, begin, end);
        constexpr int kVecs = kRows <= kMostShared ? 2 : 1;
        for (int j = 0; j < 4; j += kVecs) add_values<kRows, kVecs>(out_ + d + j * kLanes, j, begin, end);
      }
      fetch_.rest();
    }
    write(part);
  }

  // the largest 16-bit weight: below 65,535, since exp2_coarse may give a little too much
  static constexpr float kMostWeight = 65500.0f;

  static __m512i without_sign(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
  // to += the dot products of four bytes of a, without a sign, and four of b. The intrinsic has GCC 12 copy all
  // sums in each step of a loop, and store some.
  static void add_dots(__m512i& to, __m512i a, __m512i b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(to) : "v"(a), "v"(b));
  }
  static __m512i set1_quad(const int8_t* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return _mm512_set1_epi32(bits);
  }

  // Writes 16 keys to a panel.
  void transpose(const int8_t* keys, int8_t* panel) {
    for (int64_t d = 0; d < size_; d += 16) {
      transpose_singles(
          [&](int k) { return keys + k * size_ + d; },
          [&](int quad, __m512i v) { _mm512_store_si512(panel + (d + 4 * quad) * kRunKeys, without_sign(v)); });
    }
  }

  // The scores of keys n … n + 16 * kRuns - 1 of the tile.
  template <int kRows, int kRuns>
  void score(int64_t tile, int64_t n) {
    const int64_t panel_size = size_ * kRunKeys;
    __m512i high[kRows][kRuns], low[kRows][kRuns];
#pragma GCC unroll 2
    for (int run = 0; run < kRuns; ++run) {
      transpose(blocks_.key(tile + n + run * kRunKeys), panel_ + run * panel_size);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        high[i][run] = _mm512_setzero_si512();
        low[i][run] = _mm512_set1_epi32(query_starts_[i]);
      }
    }
    for (int64_t d = 0; d < size_; d += 8) {
      fetch_.some(2 * kRuns);
#pragma GCC unroll 2
      for (int64_t quad = d; quad < d + 8; quad += 4) {
        __m512i keys[kRuns];
#pragma GCC unroll 2
        for (int run = 0; run < kRuns; ++run) {
          keys[run] = _mm512_load_si512(panel_ + run * panel_size + quad * kRunKeys);
        }
        const int8_t* queries = query_bytes_ + quad * 16;
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const __m512i upper = set1_quad(queries + 4 * i);
#pragma GCC unroll 2
          for (int run = 0; run < kRuns; ++run) add_dots(high[i][run], keys[run], upper);
          const __m512i lower = set1_quad(queries + 4 * (kMaxDepthRows + i));
#pragma GCC unroll 2
          for (int run = 0; run < kRuns; ++run) add_dots(low[i][run], keys[run], lower);
        }
      }
    }
#pragma GCC unroll 2
    for (int run = 0; run < kRuns; ++run) {
      const int64_t key = n + run * kRunKeys;
      VecF scale = set1(scale_);
      if (blocks_.key_scales != nullptr) {
        scale = scale * load(blocks_.key_scales + blocks_.scale_offset(tile + key));
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const __m512i exact = _mm512_add_epi32(_mm512_slli_epi32(high[i][run], 7), low[i][run]);
        store(scores_ + i * kTileKeys + key, _mm512_cvtepi32_ps(exact) * (scale * set1(query_steps_[i])));
      }
    }
  }

  // Copies the scales of values begin … end-1 of the tile. Returns the greatest; 1 if they have none.
  float load_value_scales(int64_t tile, int64_t begin, int64_t end) {
    if (blocks_.value_scales == nullptr) return 1.0f;
    VecF greatest = set1(0.0f);
    for (int64_t n = round_down(begin, kRunKeys); n < end; n += kRunKeys) {
      // those of keys beyond the sequence may be NaN, and their weights are zero
      const int64_t from = max_of(begin - n, 0), to = min_of(end - n, kRunKeys);
      const auto used = static_cast<__mmask16>((1 << to) - (1 << from));
      const VecF scales =
          _mm512_maskz_mov_ps(used, load(blocks_.value_scales + blocks_.scale_offset(tile + n)));
      store(value_scales_ + n, scales);
      greatest = max(greatest, scales);
    }
    return reduce_max(greatest);
  }

  // Sets the step of each row's 16-bit weights. Lane i of `largest`: no weight of row i is larger.
  void set_steps(VecF largest) {
    // below, 1 / largest is infinite, and so little does not count
    const __mmask16 counts = _mm512_cmp_ps_mask(largest, set1(1e-30f), _CMP_GT_OQ);
    store(weight_steps_, _mm512_maskz_mul_ps(counts, largest, set1(1.0f / kMostWeight)));
    store(weight_factors_, _mm512_maskz_div_ps(counts, set1(kMostWeight), largest));
  }

  // Rounds weights of row i, keys n … n+15, to 16 bits.
  void store_weight(int64_t i, int64_t n, VecF weight) {
    const __m512i value = _mm512_cvtps_epi32(weight * set1(weight_factors_[i]));
    int8_t* to = weights_ + i * kTileKeys + n;
    _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_srli_epi32(value, 8)));
    _mm_store_si128(reinterpret_cast<__m128i*>(to + kMaxDepthRows * kTileKeys), _mm512_cvtepi32_epi8(value));
  }

  // Groups of four values as [4, 16 groups, 16 depths, 4], for depths d … d+63; see `put_in_order`.
  void interleave_values(int64_t d, int64_t tile, int64_t begin, int64_t end) {
    for (int64_t n = round_down(begin, 4); n < end; n += 4) {
      interleave(blocks_.value(tile + n) + d, size_, values_ + n / 4 * kBytes, kTileKeys / 4 * kBytes);
    }
  }

  // out[row, 16 depths] = out * rescale + weights * values, of vectors j … j + kVecs - 1 of depths.
  template <int kRows, int kVecs>
  void add_values(float* out, int j, int64_t begin, int64_t end) {
    constexpr int64_t kVec = kTileKeys / 4 * kBytes;
    __m512i high[kRows][kVecs], low[kRows][kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) high[i][v] = low[i][v] = _mm512_setzero_si512();
    }
    for (int64_t n = round_down(begin, 4); n < end; n += 4) {
      fetch_.some(kVecs);
      __m512i quads[kVecs];
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) quads[v] = _mm512_load_si512(values_ + (j + v) * kVec + n / 4 * kBytes);
      const int8_t* weights = weights_ + n;
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const __m512i upper = set1_quad(weights + i * kTileKeys);
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) add_dots(high[i][v], upper, quads[v]);
        const __m512i lower = set1_quad(weights + (kMaxDepthRows + i) * kTileKeys);
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) add_dots(low[i][v], lower, quads[v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        const VecF sums = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[i][v], 8), low[i][v]));
        float* to = out + i * size_ + v * kLanes;
        store(to, fma(sums, set1(weight_steps_[i]), load(to) * set1(rescale_[i])));
      }
    }
  }

  void write(Part part) const {
    for (int64_t i = 0; i < rows_.count() * size_; i += kDepths) {
      VecF v[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) v[j] = load(out_ + i + j * kLanes);
      put_in_order(v);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) store(part.out + i + j * kLanes, v[j]);
    }
  }

  const int64_t size_;
  float* const out_;     // [8, D], in the order of `interleave`
  int8_t* const panel_;  // two of [D / 4, 16 keys, 4]
  alignas(64) float weight_factors_[kLanes];
  alignas(64) int8_t values_[kTileKeys * kDepths];
};

}  // namespace
}  // namespace ascend_vllm

#endif
