// Sums of products of quant_tasks.h: some rows by some panels.
#pragma once

namespace ascend_vllm {
namespace {

constexpr int kPanelInts = kPanel / kLanes;  // vectors of one word of a panel's outputs
constexpr int64_t kFewQuantizedRows = 8;     // of a task whose panels are read one after the other
constexpr int64_t kFloatSlice = 64;          // inputs that are unpacked to floats at a time
// rows of a tile by one panel that is unpacked in registers
#if defined(__AVX512F__)
constexpr int kUnpackRows = 12;
#elif defined(__AVX2__) || defined(ASCEND_VLLM_NEON)
constexpr int kUnpackRows = 8;
#else
constexpr int kUnpackRows = 4;
#endif
// the same of 8-bit numbers
constexpr int kInt8Rows = kLanes < 16 ? 5 : kHasByteDots ? 16 : 12;
// The same of tiles by two panels, which load each input once for both; 0: there are none.
constexpr int kTallUnpackRows = kLanes == 16 ? 12 : 0;
constexpr int kTallByteRows = kLanes == 16 && kHasByteDots ? 6 : 0;
constexpr int kTallInt8Rows = kLanes == 16 && kHasByteDots ? 14 : 0;
// Maximum rows of a product whose tiles of 8-bit numbers fetch what follows; with more of them panels stay in
// the caches.
constexpr int64_t kMostFetchingRows = 256;
// How many codes, as words, are prefetched ahead of those of two panels.
constexpr int64_t kTallAhead = 4096 / 4;

// The same behind a panel's word `word`: at the end of a tile's panels those of the next tile.
template <int kPanels>
inline int64_t fetched_ahead(int64_t word, int64_t words) {
  if constexpr (kPanels == 1) return kFarAhead / 4;
  return word * kPanel + kTallAhead < words * kPanel ? kTallAhead : kTallAhead + (kPanels - 1) * words * kPanel;
}

// Calls tile.operator()<kRows, kPanels>(first row, rows, panel) for all rows and panels: by one panel with up
// to kOwnRows rows, or by two with up to kTallRows rows if there are many.
template <int kOwnRows, int kTallRows, class Tile>
inline void for_tiles(int64_t rows, int64_t panels, const Tile& tile) {
  const auto run = [&]<int kRows, int kPanels>(int64_t panel) __attribute__((always_inline)) {
    const int64_t tiles = (rows + kRows - 1) / kRows;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = rows * i / tiles;
      tile.template operator()<kRows, kPanels>(first, rows * (i + 1) / tiles - first, panel);
    }
  };
  int64_t panel = 0;
  if constexpr (kTallRows > 0) {
    for (; rows > kFewQuantizedRows && panel + 2 <= panels; panel += 2) {
      run.template operator()<kTallRows, 2>(panel);
    }
  }
  for (; panel < panels; ++panel) run.template operator()<kOwnRows, 1>(panel);
}

// How a product is divided: most rows of a task and panels of its sums, and the same of gated products.
struct PieceSizes {
  int64_t rows, panels, gated_rows, gated_panels;
  constexpr int64_t most_rows(bool is_gated) const { return is_gated ? gated_rows : rows; }
  constexpr int64_t most_panels(bool is_gated) const { return is_gated ? gated_panels : panels; }
  constexpr int64_t stride() const { return panels * kPanel; }  // of rows of sums
  constexpr int64_t sums() const { return std::max(rows, 2 * gated_rows) * stride(); }
};

// A weight's words and the blocks of its inputs.
struct QuantizedWeight {
  const uint32_t* codes;
  const char* scales;
  const uint8_t* zeros;
  DType scale_dtype;
  Code code;
  int bits, middle;
  int64_t in_features, group_size, groups, words;
  int64_t block_inputs;  // maximum inputs of a block

  explicit QuantizedWeight(const QuantizedLinearArgs& a)
      : codes(a.codes),
        scales(static_cast<const char*>(a.scales)),
        zeros(a.zeros),
        scale_dtype(a.scale_dtype),
        code(a.code),
        bits(bits_of(a.code)),
        middle(a.code == Code::kUint4   ? 8
               : a.code == Code::kUint8 ? 128
                                        : 0),
        in_features(a.in_features),
        group_size(a.group_size),
        groups((a.in_features + a.group_size - 1) / a.group_size),
        words((a.in_features * bits_of(a.code) + 31) / 32),
        block_inputs(a.rounds_inputs ? QuantizedInputs::kRoundedBlock : QuantizedInputs::kBlock) {}

  const uint32_t* panel_codes(int64_t panel) const { return codes + panel * words * kPanel; }
  // Of kLanes outputs from `lane` on.
  VecF load_scales(int64_t panel, int64_t group, int64_t lane) const {
    const int64_t at = (panel * groups + group) * kPanel + lane;
    switch (scale_dtype) {
      case DType::kFloat32:
        return load(reinterpret_cast<const float*>(scales) + at);
      case DType::kBFloat16:
        return load(reinterpret_cast<const bfloat16*>(scales) + at);
      default:
        return load(reinterpret_cast<const float16*>(scales) + at);
    }
  }
  VecI load_zeros(int64_t panel, int64_t group, int64_t lane) const {
    return zeros == nullptr ? set1_i(middle) : load_bytes(zeros + (panel * groups + group) * kPanel + lane);
  }
  // Calls body(group, block, begin, end) for each block of inputs.
  template <class Body>
  void for_blocks(const Body& body) const {
    int64_t block = 0;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t last = std::min(in_features, (group + 1) * group_size);
      for (int64_t begin = group * group_size; begin < last; begin += block_inputs) {
        body(group, block++, begin, std::min(last, begin + block_inputs));
      }
    }
  }
};

// Rows of 16-bit integers in pairs.
struct IntegerRows {
  const int32_t* pairs;
  int64_t stride;         // pairs from row to row
  const float* scales;    // [rows, blocks]
  const int32_t* totals;  // [rows, blocks]
  int64_t blocks;
};

template <class T>
inline VecF load_ordered(const T* x, const int32_t* order, int n) {
  T buffer[kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = x[order[i]];
  return load(buffer);
}

inline void store_integers(int16_t* to, VecF v) { store_int16(to, v); }
inline void store_integers(int8_t* to, VecF v) { store_int8(to, v); }

// A row of x as 16-bit integers, or 8-bit ones, with the scale and the sum of each block.
template <class T, class Integer>
inline void round_row(const QuantizedLinearArgs& a, const QuantizedWeight& weight, const T* x, Integer* to,
                      int64_t stride, float* scales, int32_t* totals) {
  alignas(64) float values[QuantizedInputs::kBlock + kLanes];
  weight.for_blocks([&](int64_t, int64_t block, int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    VecF top = set1(0.0f);
    const auto add = [&](int64_t i, VecF v) {
      store(values + i, v);
      top = max(top, abs(v));
    };
    for_lanes(
        n,
        [&](int64_t i) {
          add(i, a.order ? load_ordered(x, a.order + begin + i, kLanes) : load(x + begin + i));
        },
        [&](int64_t i, int rest) {
          add(i, a.order ? load_ordered(x, a.order + begin + i, rest) : load_n(x + begin + i, rest));
        });
    const float largest = reduce_max(top);
    const float scale = a.rounds_inputs ? largest / 127.0f : largest * (1.0f / 32767.0f);
    const VecF divisor = set1(scale), factor = set1(32767.0f / largest);
    const bool is_zero = !(scale > 1e-30f);
    Integer* own = to + begin;
    VecF sum = set1(0.0f);
    for (int64_t i = 0; i < n; i += kLanes) {
      const VecF value = load(values + i);
      const VecF integer = round_nearest(a.rounds_inputs ? value / divisor : value * factor);
      // zeros as the values are, unless these are not finite
      const VecF number = is_zero ? value * set1(0.0f) : integer;
      store_integers(own + i, number);
      sum = sum + number;
    }
    // exact, unless a value is not finite
    const float total = reduce_add(sum);
    const bool is_finite = total - total == 0.0f;
    scales[block] = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : scale;
    totals[block] = is_finite ? static_cast<int32_t>(total) : 0;
  });
  __builtin_memset(to + a.in_features, 0, (stride - a.in_features) * sizeof(Integer));
}

// A row of x as floats or bfloat16.
template <class T, class X>
inline void widen_ordered(const QuantizedLinearArgs& a, const T* x, X* to, int64_t stride) {
  for_lanes(
      a.in_features,
      [&](int64_t i) { store(to + i, a.order ? load_ordered(x, a.order + i, kLanes) : load(x + i)); },
      [&](int64_t i, int rest) {
        store_n(to + i, a.order ? load_ordered(x, a.order + i, rest) : load_n(x + i, rest), rest);
      });
  __builtin_memset(to + a.in_features, 0, (stride - a.in_features) * sizeof(X));
}

// The j-th pair of inputs of each word.
template <int kBits, int kPair>
inline VecI pair_of(VecI words) {
  const VecI mask = set1_i(kBits == 4 ? 0x000f000f : 0x00ff00ff);
  return and_i(shift_right<kBits * kPair>(words), mask);
}

// sums[kRows][kPanels * 16 of kGroup * 16] += a block's products with kLanes outputs of each panel, unpacked in
// registers.
template <int kRows, int kBits, int kPanels>
inline void add_block(const QuantizedWeight& weight, const IntegerRows& x, int64_t panel, int64_t lane,
                      int64_t group, int64_t block, int64_t first_word, int64_t words, float* sums) {
  constexpr int kPairs = 16 / kBits;
  // sums of a row that do not wait for each other; they are exact, so their order does not matter
  constexpr int kChains = kRows * kPanels >= 4 ? 1 : kRows == 1 ? kPairs : 2;
  VecI acc[kRows][kPanels][kChains];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) acc[r][p][c] = set1_i(0);
    }
  }
  const uint32_t* w = weight.panel_codes(panel) + first_word * kPanel + lane;
  const int64_t panel_size = weight.words * kPanel, ahead = fetched_ahead<kPanels>(first_word, weight.words);
  const int32_t* pairs = x.pairs + first_word * kPairs;
  for (int64_t u = 0; u < words; ++u) {
    VecI word[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const uint32_t* own = w + p * panel_size + u * kPanel;
      word[p] = load_i(own);
      __builtin_prefetch(own + ahead);
    }
    const auto multiply = [&]<int kPair>() __attribute__((always_inline)) {
      VecI pair[kPanels];
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) pair[p] = pair_of<kBits, kPair>(word[p]);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const VecI input = set1_i(pairs[r * x.stride + u * kPairs + kPair]);
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          VecI& sum = acc[r][p][kPair % kChains];
          sum = dot_halves(sum, input, pair[p]);
        }
      }
    };
    multiply.template operator()<0>();
    multiply.template operator()<1>();
    if constexpr (kPairs == 4) {
      multiply.template operator()<2>();
      multiply.template operator()<3>();
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
    const VecI zero = weight.load_zeros(panel + p, group, lane);
    const VecF scale = weight.load_scales(panel + p, group, lane);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      VecI sum = acc[r][p][0];
#pragma GCC unroll 4
      for (int c = 1; c < kChains; ++c) sum = add_i(sum, acc[r][p][c]);
      sum = sub_i(sum, mul_i(zero, set1_i(x.totals[r * x.blocks + block])));
      float* to = sums + (r * kGroup + p) * kPanel;
      const VecF product = to_float(sum) * set1(x.scales[r * x.blocks + block]);
      store(to, block == 0 ? product * scale : fma(product, scale, load(to)));
    }
  }
}

// sums[kRows][kPanels * 16 of kGroup * 16] = integer rows by panels.
template <int kRows, int kBits, int kPanels>
__attribute__((noinline)) void multiply_tile_of_codes(const QuantizedWeight& weight, const IntegerRows& x,
                                                      int64_t panel, float* sums) {
  constexpr int64_t kInputs = 32 / kBits;
  weight.for_blocks([&](int64_t group, int64_t block, int64_t begin, int64_t end) {
    const int64_t first = begin / kInputs, words = (end + kInputs - 1) / kInputs - first;
#pragma GCC unroll 4
    for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
      add_block<kRows, kBits, kPanels>(weight, x, panel, lane, group, block, first, words, sums + lane);
    }
  });
}

// Chooses the code for `rows` <= kRows rows.
template <int kRows, int kBits, int kPanels>
inline void multiply_codes(int64_t rows, const QuantizedWeight& weight, const IntegerRows& x, int64_t panel,
                           float* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_codes<kRows - 1, kBits, kPanels>(rows, weight, x, panel, sums);
  }
  multiply_tile_of_codes<kRows, kBits, kPanels>(weight, x, panel, sums);
}

// sums[rows][kGroup * 16] = integer rows by panels.
inline void multiply_integers(const QuantizedWeight& weight, const IntegerRows& x, int64_t rows, int64_t panel,
                              int64_t panels, float* sums) {
  for_tiles<kUnpackRows, kTallUnpackRows>(
      rows, panels, [&]<int kRows, int kPanels>(int64_t first, int64_t count, int64_t p) {
        const IntegerRows own{x.pairs + first * x.stride, x.stride, x.scales + first * x.blocks,
                              x.totals + first * x.blocks, x.blocks};
        float* to = sums + (first * kGroup + p) * kPanel;
        weight.bits == 4 ? multiply_codes<kRows, 4, kPanels>(count, weight, own, panel + p, to)
                         : multiply_codes<kRows, 8, kPanels>(count, weight, own, panel + p, to);
      });
}

#ifdef ASCEND_VLLM_BYTE_DOTS

// Puts the bytes of 8-bit inputs in the order in which words have theirs: 0, 2, 1 and 3 of four, or 0, 4, 1, 5,
// 2, 6, 3 and 7 of eight, whose lower halves of bytes are the first four.
inline void arrange_bytes(int bits, int8_t* x, int64_t size) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  const Bytes quads{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
  const Bytes octets{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
  for (int64_t k = 0; k < size; k += 16) {
    Bytes bytes;
    __builtin_memcpy(&bytes, x + k, sizeof bytes);
    bytes = __builtin_shuffle(bytes, bits == 4 ? octets : quads);
    __builtin_memcpy(x + k, &bytes, sizeof bytes);
  }
}

// Rows of 8-bit integers in quads.
struct ByteRows {
  const int32_t* quads;
  int64_t stride;         // quads from row to row
  const float* scales;    // [rows, blocks]
  const int32_t* totals;  // [rows, blocks]
  int64_t blocks;
};

// sums[kRows][kPanels * 16 of sums_stride] = 8-bit rows by kLanes outputs of each panel, from `lane` on. A
// block's sum is exact; it is scaled and added as those of 16-bit integers are, so that sets may be mixed.
template <int kRows, int kBits, int kPanels>
__attribute__((noinline)) void multiply_tile_of_bytes(const QuantizedWeight& weight, const ByteRows& x,
                                                      int64_t panel, int64_t lane, int64_t sums_stride,
                                                      float* sums) {
  constexpr int kQuads = 8 / kBits, kInputs = 4 * kQuads;
  constexpr int kChains = kRows * kPanels == 1 ? kQuads : 1;
  constexpr int kMiddleBits = kBits == 8 ? 7 : 3;  // the middle of the codes is a power of two
  constexpr bool kStartsAtMiddle = kBits == 4 || kByteBias == 0;
  const uint32_t* codes = weight.panel_codes(panel) + lane;
  const int64_t panel_size = weight.words * kPanel;
  VecF results[kRows][kPanels];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) results[r][p] = set1(0.0f);
  }
  int64_t block = 0;
  for (int64_t group = 0; group < weight.groups; ++group) {
    VecF group_scales[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) group_scales[p] = weight.load_scales(panel + p, group, lane);
    const int64_t last = std::min(weight.in_features, (group + 1) * weight.group_size);
    for (int64_t begin = group * weight.group_size; begin < last; begin += weight.block_inputs, ++block) {
      const int64_t end = std::min(last, begin + weight.block_inputs);
      VecI acc[kRows][kPanels][kChains];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const VecI total = set1_i(x.totals[r * x.blocks + block]);
        const VecI start = kStartsAtMiddle ? sub_i(set1_i(0), shift_left<kMiddleBits>(total)) : set1_i(0);
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          acc[r][p][0] = start;
          if constexpr (kChains == 2) acc[r][p][1] = set1_i(0);
        }
      }
      const int64_t ahead = fetched_ahead<kPanels>(begin / kInputs, weight.words);
      for (int64_t u = begin / kInputs; u < (end + kInputs - 1) / kInputs; ++u) {
        VecI word[kPanels];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          const uint32_t* own = codes + p * panel_size + u * kPanel;
          word[p] = load_i(own);
          __builtin_prefetch(own + ahead);
        }
        const VecI mask = set1_i(0x0f0f0f0f);
        const auto multiply = [&]<int kQuad>() __attribute__((always_inline)) {
          VecI quad[kPanels];
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) {
            quad[p] = kBits == 4 ? and_i(shift_right<4 * kQuad>(word[p]), mask) : byte_operand(word[p]);
          }
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const VecI input = set1_i(x.quads[r * x.stride + u * kQuads + kQuad]);
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) {
              VecI& sum = acc[r][p][kQuad % kChains];
              sum = dot_bytes(sum, quad[p], input);
            }
          }
        };
        multiply.template operator()<0>();
        if constexpr (kQuads == 2) multiply.template operator()<1>();
      }
      if (weight.zeros != nullptr) {
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          const VecI offset = sub_i(weight.load_zeros(panel + p, group, lane), set1_i(weight.middle));
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            acc[r][p][0] = sub_i(acc[r][p][0], mul_i(offset, set1_i(x.totals[r * x.blocks + block])));
          }
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const VecF scale = set1(x.scales[r * x.blocks + block]);
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          VecI sum = acc[r][p][0];
          if constexpr (kChains == 2) sum = add_i(sum, acc[r][p][1]);
          results[r][p] = fma(to_float(sum) * scale, group_scales[p], results[r][p]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) store(sums + r * sums_stride + p * kPanel, results[r][p]);
  }
}

// Chooses the code for `rows` <= kRows rows.
template <int kRows, int kBits, int kPanels>
inline void multiply_bytes(int64_t rows, const QuantizedWeight& weight, const ByteRows& x, int64_t panel,
                           int64_t sums_stride, float* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return multiply_bytes<kRows - 1, kBits, kPanels>(rows, weight, x, panel, sums_stride, sums);
    }
  }
  for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
    multiply_tile_of_bytes<kRows, kBits, kPanels>(weight, x, panel, lane, sums_stride, sums + lane);
  }
}

// sums[rows][sums_stride] = 8-bit rows, whose blocks are rounded, by panels.
inline void multiply_rounded(const QuantizedWeight& weight, const ByteRows& x, int64_t rows, int64_t panel,
                             int64_t panels, int64_t sums_stride, float* sums) {
  for_tiles<kUnpackRows, kTallByteRows>(
      rows, panels, [&]<int kRows, int kPanels>(int64_t first, int64_t count, int64_t p) {
        const ByteRows own{x.quads + first * x.stride, x.stride, x.scales + first * x.blocks,
                           x.totals + first * x.blocks, x.blocks};
        float* to = sums + first * sums_stride + p * kPanel;
        weight.bits == 4 ? multiply_bytes<kRows, 4, kPanels>(count, weight, own, panel + p, sums_stride, to)
                         : multiply_bytes<kRows, 8, kPanels>(count, weight, own, panel + p, sums_stride, to);
      });
}

#else

inline void arrange_bytes(int, int8_t*, int64_t) {}

#endif

// The floats of codes with zeros and scales, kLanes of them.
template <Code kCode>
inline VecF float_of(VecI code, VecF zero, VecF scale) {
  if constexpr (kCode != Code::kFloat8E4m3) return (to_float(code) - zero) * scale;
  // exponent and mantissa moved to those of a float, whose bias is larger by 120; the smallest have no leading
  // one, and the largest is NaN
  const VecI bits = shift_left<20>(and_i(code, set1_i(0x7f)));
  const VecF normal = as_float(add_i(bits, set1_i(120 << 23)));
  const VecF small = as_float(add_i(bits, set1_i(121 << 23))) - set1(0x1p-6f);
  VecF magnitude = select(gt(set1(0x1p-6f), normal), small, normal);
  magnitude = select(gt(magnitude, set1(479.0f)), set1(__builtin_nanf("")), magnitude);
  const VecF sign = as_float(or_i(shift_left<24>(and_i(code, set1_i(0x80))), set1_i(0x3f800000)));
  return magnitude * sign * scale;
}

// Unpacks inputs [begin, end) of one panel to floats [inputs, 16]; begin is the first of a word.
template <Code kCode>
inline void unpack_floats(const QuantizedWeight& weight, int64_t panel, int64_t begin, int64_t end, float* to) {
  constexpr int kBits = kCode == Code::kUint4 ? 4 : 8, kInputs = 32 / kBits;
  const uint32_t* codes = weight.panel_codes(panel);
  for (int64_t k = begin; k < end;) {
    const int64_t group = k / weight.group_size;
    const int64_t last = std::min(end, (group + 1) * weight.group_size);
    for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
      const VecF zero = to_float(weight.load_zeros(panel, group, lane));
      const VecF scale = weight.load_scales(panel, group, lane);
      for (int64_t i = k; i < last; i += kInputs) {
        const VecI word = load_i(codes + i / kInputs * kPanel + lane);
        float* own = to + (i - begin) * kPanel + lane;
        const auto unpack = [&]<int kPair>() __attribute__((always_inline)) {
          const VecI pair = pair_of<kBits, kPair>(word);
          store(own + 2 * kPair * kPanel, float_of<kCode>(and_i(pair, set1_i(0xffff)), zero, scale));
          store(own + (2 * kPair + 1) * kPanel, float_of<kCode>(shift_right<16>(pair), zero, scale));
        };
        unpack.template operator()<0>();
        unpack.template operator()<1>();
        if constexpr (kInputs == 8) {
          unpack.template operator()<2>();
          unpack.template operator()<3>();
        }
      }
    }
    k = last;
  }
}

// sums[rows][kGroup * 16] = rows of floats by panels.
inline void multiply_floats(const QuantizedWeight& weight, const float* x, int64_t x_stride, int64_t rows,
                            int64_t panel, int64_t panels, float* sums) {
  // the last word of a slice may have inputs beyond the last one
  constexpr int64_t kPanelSize = kFloatSlice * kPanel;
  alignas(64) float unpacked[kGroup * kPanelSize];
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t begin = 0; begin < weight.in_features; begin += kFloatSlice) {
    const int64_t end = std::min(weight.in_features, begin + kFloatSlice);
    for (int64_t p = 0; p < panels; ++p) {
      float* to = unpacked + p * kPanelSize;
      switch (weight.code) {
        case Code::kUint4:
          unpack_floats<Code::kUint4>(weight, panel + p, begin, end, to);
          break;
        case Code::kUint8:
          unpack_floats<Code::kUint8>(weight, panel + p, begin, end, to);
          break;
        case Code::kFloat8E4m3:
          unpack_floats<Code::kFloat8E4m3>(weight, panel + p, begin, end, to);
          break;
      }
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
      multiply_rows<kMaxRows, false>(last - first, x + first * x_stride, x_stride, unpacked - begin * kPanel,
                                     kPanelSize, panels, begin, end, sums + first * kGroup * kPanel);
    }
  }
}

#ifdef __AVX512BF16__

// The bfloat16 numbers, which are exact, of the 8 codes without a leading one, in units of 2^-9.
struct Float8Table {
  alignas(64) uint16_t bits[32];
  constexpr Float8Table() : bits{} {
    for (int mantissa = 1; mantissa < 8; ++mantissa) {
      const int lead = mantissa < 2 ? 0 : mantissa < 4 ? 1 : 2;
      bits[mantissa] = static_cast<uint16_t>((lead + 118) << 7 | (mantissa << (7 - lead) & 0x7f));
    }
  }
};
constexpr Float8Table kSmallFloat8;
constexpr int kFloat8Rows = 8;

// The bfloat16 numbers of pairs of codes, whose exponents are moved: their bias is larger by 120.
__attribute__((always_inline)) inline __m512bh widen_float8(VecI pair) {
  const __m512i code = (__m512i)and_i(pair, set1_i(0x007f007f));
  __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
  bits = _mm512_mask_permutexvar_epi16(bits, is_small, code, _mm512_load_si512(kSmallFloat8.bits));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(code, _mm512_set1_epi16(0x7f));
  bits = _mm512_mask_mov_epi16(bits, is_nan, _mm512_set1_epi16(0x7fc0));
  return reinterpret_cast<__m512bh>((__m512i)or_i((VecI)bits, shift_left<8>(and_i(pair, set1_i(0x00800080)))));
}

// sums[kRows][16 of kGroup * 16] = rows of bfloat16 pairs by one panel of float8_e4m3.
template <int kRows>
__attribute__((noinline)) void multiply_float8_tile(const QuantizedWeight& weight, const int32_t* x,
                                                    int64_t x_stride, int64_t panel, float* sums) {
  const uint32_t* codes = weight.panel_codes(panel);
  weight.for_blocks([&](int64_t group, int64_t block, int64_t begin, int64_t end) {
    // two sums of each row, which do not wait for each other
    VecF acc[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = set1(0.0f);
    for (int64_t u = begin / 4; u < (end + 3) / 4; ++u) {
      const VecI word = load_i(codes + u * kPanel);
      __builtin_prefetch(reinterpret_cast<const char*>(codes + u * kPanel) + kAhead);
      const __m512bh first = widen_float8(pair_of<8, 0>(word)), second = widen_float8(pair_of<8, 1>(word));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const int32_t* pairs = x + r * x_stride + 2 * u;
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], reinterpret_cast<__m512bh>((__m512i)set1_i(pairs[0])), first);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], reinterpret_cast<__m512bh>((__m512i)set1_i(pairs[1])), second);
      }
    }
    const VecF scale = weight.load_scales(panel, group, 0);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* to = sums + r * kGroup * kPanel;
      const VecF sum = acc[r][0] + acc[r][1];
      store(to, block == 0 ? sum * scale : fma(sum, scale, load(to)));
    }
  });
}

// Chooses the code for `rows` <= kRows rows.
template <int kRows>
inline void multiply_float8_rows(int64_t rows, const QuantizedWeight& weight, const int32_t* x,
                                 int64_t x_stride, int64_t panel, float* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_float8_rows<kRows - 1>(rows, weight, x, x_stride, panel, sums);
  }
  multiply_float8_tile<kRows>(weight, x, x_stride, panel, sums);
}

// sums[rows][kGroup * 16] = rows of bfloat16 by panels of float8_e4m3; the stride is that of pairs.
inline void multiply_float8(const QuantizedWeight& weight, const int32_t* x, int64_t x_stride, int64_t rows,
                            int64_t panel, int64_t panels, float* sums) {
  const int64_t tiles = (rows + kFloat8Rows - 1) / kFloat8Rows;
  for (int64_t p = 0; p < panels; ++p) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
      multiply_float8_rows<kFloat8Rows>(count, weight, x + first * x_stride, x_stride, panel + p,
                                        sums + (first * kGroup + p) * kPanel);
    }
  }
}

#endif

// 8-bit inputs as the products read them. The bytes of a word are inputs 0, 2, 1 and 3.
struct Int8Pairs {
  using Input = int16_t;
  static constexpr int kUnits = 2;  // 32-bit units of inputs per word
  static int32_t arrange(const int8_t* q, int64_t inputs, Input* to, int64_t stride) {
    int32_t total = 0;
    for (int64_t k = 0; k < inputs; ++k) {
      to[k] = q[k];
      total += q[k];
    }
    __builtin_memset(to + inputs, 0, (stride - inputs) * sizeof(Input));
    return total;
  }
};
struct Int8Quads {
  using Input = int8_t;
  static constexpr int kUnits = 1;
  static int32_t arrange(const int8_t* q, int64_t inputs, Input* to, int64_t stride) {
    int32_t total = 0;
    for (int64_t k = 0; k < inputs; ++k) total += q[k];
    __builtin_memcpy(to, q, inputs);
    __builtin_memset(to + inputs, 0, stride - inputs);
    for (int64_t k = 0; k < stride; k += 4 * kLanes) {
      const VecI quads = load_i(to + k);
      const VecI second = and_i(shift_left<8>(quads), set1_i(0x00ff0000));
      const VecI third = and_i(shift_right<8>(quads), set1_i(0x0000ff00));
      store_i(to + k, or_i(and_i(quads, set1_i(static_cast<int32_t>(0xff0000ffu))), or_i(second, third)));
    }
    return total;
  }
};
template <bool kByteDots>
struct Int8DotOf {
  using type = Int8Pairs;
};
template <>
struct Int8DotOf<true> {
  using type = Int8Quads;
};
using Int8Dot = Int8DotOf<kHasByteDots>::type;

// The results of one panel by sums of products with codes, which are the weights + 128.
class Int8Results {
 public:
  Int8Results(const Int8LinearArgs& a, int64_t panel) : a_(a), first_(panel * kPanel) {
    if (a.q_offsets == nullptr) return;
    __builtin_memcpy(weight_sums_, a.sums + first_,
                     std::min<int64_t>(kPanel, a.out_features - first_) * sizeof(int32_t));
  }
  // Of kLanes outputs from `lane` on; total: the sum of the row.
  VecF of(VecI sum, int32_t total, int64_t row, int64_t lane) const {
    VecI whole = sub_i(sum, set1_i((128 - kByteBias) * total));
    if (a_.q_offsets != nullptr) {
      whole = sub_i(whole, mul_i(set1_i(a_.q_offsets[row]), load_i(weight_sums_ + lane)));
    }
    return to_float(whole) * (set1(a_.q_scales[row]) * load(a_.scales + first_ + lane));
  }

 private:
  const Int8LinearArgs& a_;
  const int64_t first_;
  alignas(64) int32_t weight_sums_[kPanel] = {};
};

// sums[kRows][kPanels * 16 of kGroup * 16] = rows from `row` on by panels; x and totals are those of `row`.
// following: a panel that is prefetched to the second cache.
template <int kRows, int kPanels>
__attribute__((noinline)) void multiply_int8_tile(const Int8LinearArgs& a, const int32_t* x, int64_t x_stride,
                                                  const int32_t* totals, int64_t row, int64_t panel,
                                                  int64_t following, float* sums) {
  constexpr int kVectors = kPanels * kPanelInts;
  // sums of a row that do not wait for each other
  constexpr int kChains = kVectors > 1 || kRows >= 4 ? 1 : kRows == 1 ? 4 : 2;
  VecI acc[kRows][kVectors][kChains];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) acc[r][v][c] = set1_i(0);
    }
  }
  const int64_t words = (a.in_features + 3) / 4;
  const uint32_t* w = a.codes + panel * words * kPanel;
  const uint32_t* then = a.codes + following * words * kPanel;
  const auto add = [&]<int kChain>(int64_t u, int64_t ahead) __attribute__((always_inline)) {
    VecI word[kVectors];
    if constexpr (kPanels > 1) __builtin_prefetch(then + u * kPanel, 0, 2);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t* own = w + (v / kPanelInts * words + u) * kPanel + v % kPanelInts * kLanes;
      if (v % kPanelInts == 0) __builtin_prefetch(own + ahead);
      const VecI codes = load_i(own);
      word[v] = kHasByteDots ? byte_operand(codes) : codes;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const int32_t* units = x + r * x_stride + u * Int8Dot::kUnits;
      if constexpr (kHasByteDots) {
        const VecI input = set1_i(*units);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v][kChain] = dot_bytes(acc[r][v][kChain], word[v], input);
      } else {
        const VecI even = set1_i(units[0]), odd = set1_i(units[1]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const VecI sum = dot_halves(acc[r][v][kChain], even, pair_of<8, 0>(word[v]));
          acc[r][v][kChain] = dot_halves(sum, odd, pair_of<8, 1>(word[v]));
        }
      }
    }
  };
  const auto add_all = [&](int64_t u, int64_t end, int64_t ahead) __attribute__((always_inline)) {
    for (; u + kChains <= end; u += kChains) {
      add.template operator()<0>(u, ahead);
      if constexpr (kChains > 1) add.template operator()<1>(u + 1, ahead);
      if constexpr (kChains > 2) {
        add.template operator()<2>(u + 2, ahead);
        add.template operator()<3>(u + 3, ahead);
      }
    }
    for (; u < end; ++u) add.template operator()<0>(u, ahead);
  };
  const int64_t turn = kPanels == 1 ? words : std::max<int64_t>(0, words - kTallAhead / kPanel);
  add_all(0, turn, fetched_ahead<kPanels>(0, words));
  if (turn < words) add_all(turn, words, fetched_ahead<kPanels>(words, words));
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) {
    const Int8Results results(a, panel + p);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kPanelInts; ++v) {
        const VecI* own = acc[r][p * kPanelInts + v];
        VecI sum = own[0];
#pragma GCC unroll 4
        for (int c = 1; c < kChains; ++c) sum = add_i(sum, own[c]);
        store(sums + (r * kGroup + p) * kPanel + v * kLanes, results.of(sum, totals[r], row + r, v * kLanes));
      }
    }
  }
}

// Chooses the code for `rows` <= kRows rows.
template <int kRows, int kPanels>
inline void multiply_int8_rows(int64_t rows, const Int8LinearArgs& a, const int32_t* x, int64_t x_stride,
                               const int32_t* totals, int64_t row, int64_t panel, int64_t following,
                               float* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return multiply_int8_rows<kRows - 1, kPanels>(rows, a, x, x_stride, totals, row, panel, following, sums);
    }
  }
  multiply_int8_tile<kRows, kPanels>(a, x, x_stride, totals, row, panel, following, sums);
}

// sums[rows][kGroup * 16] = rows from `row` on by panels. next: the panel that probably follows those. The
// tiles of two panels fetch the two that follow, the first tile one of them and the others the other: memory
// would have nothing to do while panels are read again.
inline void multiply_int8(const Int8LinearArgs& a, const int32_t* x, int64_t x_stride, const int32_t* totals,
                          int64_t row, int64_t rows, int64_t panel, int64_t panels, int64_t next, float* sums) {
  const int64_t all_panels = (a.out_features + kPanel - 1) / kPanel;
  for_tiles<kInt8Rows, kTallInt8Rows>(
      rows, panels, [&]<int kRows, int kPanels>(int64_t first, int64_t count, int64_t p) {
        int64_t following = (p + 2 < panels ? panel + p + 2 : next) + (first == 0 ? 0 : 1);
        if (count == rows || a.rows > kMostFetchingRows || following >= all_panels) following = panel + p;
        multiply_int8_rows<kRows, kPanels>(count, a, x + first * x_stride, x_stride, totals + first,
                                           row + first, panel + p, following,
                                           sums + (first * kGroup + p) * kPanel);
      });
}

}  // namespace
}  // namespace ascend_vllm
