// Sums of products of quant_gemm.h: some rows by some panels.
#pragma once

namespace ascend_vllm {
namespace {

constexpr int kPanelInts = kPanel / kLanes;  // vectors of one word of a panel's outputs
constexpr int64_t kFewQuantizedRows = 8;     // multiplied without unpacking panels to memory
constexpr int64_t kFewRowsPanels = 16;       // maximum panels of a task with few rows
constexpr int64_t kFloatSlice = 64;          // inputs that are unpacked to floats at a time
// Rows and panels of a tile, whose sums fill the registers.
#if defined(__AVX512VNNI__)
constexpr int kIntRows = 14, kIntPanels = 2;
#elif defined(__AVX512F__)
constexpr int kIntRows = 12, kIntPanels = 2;
#elif defined(__AVX2__)
constexpr int kIntRows = 5, kIntPanels = 1;
#else
constexpr int kIntRows = 2, kIntPanels = 1;
#endif

// A weight's words and the blocks of its inputs.
struct QuantizedWeight {
  const uint32_t* codes;
  const char* scales;
  const uint8_t* zeros;
  DType scale_dtype;
  Code code;
  int bits, middle;
  int64_t in_features, group_size, groups, words;

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
        words((a.in_features * bits_of(a.code) + 31) / 32) {}

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
      for (int64_t begin = group * group_size; begin < last; begin += QuantizedInputs::kBlock) {
        body(group, block++, begin, std::min(last, begin + QuantizedInputs::kBlock));
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

// Row t of x as 16-bit integers, with the scale and the sum of each block.
template <class T>
inline void round_row(const QuantizedLinearArgs& a, const QuantizedWeight& weight, int64_t t, int16_t* to,
                      int64_t stride, float* scales, int32_t* totals) {
  const T* x = static_cast<const T*>(a.x) + t * a.x_stride;
  alignas(64) float values[QuantizedInputs::kBlock + kLanes];
  weight.for_blocks([&](int64_t, int64_t block, int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    VecF top = set1(0.0f), not_finite = set1(0.0f);
    const auto add = [&](int64_t i, VecF v) {
      store(values + i, v);
      top = max(top, abs(v));
      not_finite = fma(v, set1(0.0f), not_finite);
    };
    for_lanes(
        n,
        [&](int64_t i) {
          add(i, a.order ? load_ordered(x, a.order + begin + i, kLanes) : load(x + begin + i));
        },
        [&](int64_t i, int rest) {
          add(i, a.order ? load_ordered(x, a.order + begin + i, rest) : load_n(x + begin + i, rest));
        });
    const float largest = reduce_max(top), poison = reduce_add(not_finite);
    scales[block] = largest * (1.0f / 32767.0f) + poison;
    totals[block] = 0;
    if (!(scales[block] > 1e-30f)) {
      __builtin_memset(to + begin, 0, n * sizeof(int16_t));
      if (scales[block] <= 1e-30f) scales[block] = 0.0f;
      return;
    }
    const VecF factor = set1(32767.0f / largest);
    int16_t* own = to + begin;
    for (int64_t i = 0; i < n; i += kLanes) store_int16(own + i, round_nearest(load(values + i) * factor));
    int32_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += own[i];
    totals[block] = total;
  });
  __builtin_memset(to + a.in_features, 0, (stride - a.in_features) * sizeof(int16_t));
}

// Row t of x as floats.
template <class T>
inline void widen_ordered(const QuantizedLinearArgs& a, int64_t t, float* to, int64_t stride) {
  const T* x = static_cast<const T*>(a.x) + t * a.x_stride;
  for_lanes(
      a.in_features,
      [&](int64_t i) { store(to + i, a.order ? load_ordered(x, a.order + i, kLanes) : load(x + i)); },
      [&](int64_t i, int rest) {
        store_n(to + i, a.order ? load_ordered(x, a.order + i, rest) : load_n(x + i, rest), rest);
      });
  __builtin_memset(to + a.in_features, 0, (stride - a.in_features) * sizeof(float));
}

// The j-th pair of inputs of each word.
template <int kBits, int kPair>
inline VecI pair_of(VecI words) {
  const VecI mask = set1_i(kBits == 4 ? 0x000f000f : 0x00ff00ff);
  return and_i(shift_right<kBits * kPair>(words), mask);
}

// sums[kRows][16] += a block's products with `lanes` of one panel, unpacked in registers.
template <int kRows, int kBits>
inline void add_block(const IntegerRows& x, int64_t block, const uint32_t* w, int64_t first_word, int64_t words,
                      VecF scale, VecI zero, int64_t lane, float* sums) {
  constexpr int kPairs = 16 / kBits;
  // sums of a row that do not wait for each other; they are exact, so their order does not matter
  constexpr int kChains = kRows >= 4 ? 1 : kRows == 1 ? kPairs : 2;
  VecI acc[kRows][kChains];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) acc[r][c] = set1_i(0);
  }
  const int32_t* pairs = x.pairs + first_word * kPairs;
  for (int64_t u = 0; u < words; ++u) {
    const VecI word = load_i(w + u * kPanel);
    __builtin_prefetch(reinterpret_cast<const char*>(w + u * kPanel) + kAhead);
    const auto multiply = [&]<int kPair>() __attribute__((always_inline)) {
      const VecI pair = pair_of<kBits, kPair>(word);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        VecI& sum = acc[r][kPair % kChains];
        sum = dot_halves(sum, set1_i(pairs[r * x.stride + u * kPairs + kPair]), pair);
      }
    };
    multiply.template operator()<0>();
    multiply.template operator()<1>();
    if constexpr (kPairs == 4) {
      multiply.template operator()<2>();
      multiply.template operator()<3>();
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    VecI sum = acc[r][0];
#pragma GCC unroll 4
    for (int c = 1; c < kChains; ++c) sum = add_i(sum, acc[r][c]);
    sum = sub_i(sum, mul_i(zero, set1_i(x.totals[r * x.blocks + block])));
    float* to = sums + r * kGroup * kPanel + lane;
    const VecF product = to_float(sum) * set1(x.scales[r * x.blocks + block]);
    store(to, block == 0 ? product * scale : fma(product, scale, load(to)));
  }
}

template <int kRows, int kBits>
__attribute__((noinline)) void multiply_few_integers(const QuantizedWeight& weight, const IntegerRows& x,
                                                     int64_t panel, int64_t panels, float* sums) {
  constexpr int64_t kInputs = 32 / kBits;
  for (int64_t p = 0; p < panels; ++p) {
    const uint32_t* codes = weight.panel_codes(panel + p);
    weight.for_blocks([&](int64_t group, int64_t block, int64_t begin, int64_t end) {
      const int64_t first = begin / kInputs, words = (end + kInputs - 1) / kInputs - first;
#pragma GCC unroll 4
      for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
        add_block<kRows, kBits>(x, block, codes + first * kPanel + lane, first, words,
                                weight.load_scales(panel + p, group, lane),
                                weight.load_zeros(panel + p, group, lane), lane, sums + p * kPanel);
      }
    });
  }
}

// Chooses the code for `rows` <= kRows rows.
template <int kRows, int kBits>
inline void multiply_few_rows(int64_t rows, const QuantizedWeight& weight, const IntegerRows& x, int64_t panel,
                              int64_t panels, float* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_few_rows<kRows - 1, kBits>(rows, weight, x, panel, panels, sums);
  }
  multiply_few_integers<kRows, kBits>(weight, x, panel, panels, sums);
}

// Calls tile.run<rows, panels>() for `rows` <= kRows rows.
template <int kRows, int kPanels, class Tile>
inline void with_tile(int64_t rows, const Tile& tile) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_tile<kRows - 1, kPanels>(rows, tile);
  }
  tile.template run<kRows, kPanels>();
}

// All tiles of rows by panels: tile_of(row, panel) returns the tile at that place.
template <class TileOf>
inline void for_tiles(int64_t rows, int64_t panels, const TileOf& tile_of) {
  const int64_t tiles = (rows + kIntRows - 1) / kIntRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
    int64_t p = 0;
    for (; p + kIntPanels <= panels; p += kIntPanels) with_tile<kIntRows, kIntPanels>(count, tile_of(first, p));
    for (; p < panels; ++p) with_tile<kIntRows, 1>(count, tile_of(first, p));
  }
}

// Unpacks words of one panel to pairs minus their zeros, [words * kPairs, 16].
template <int kBits>
inline void unpack_pairs(const uint32_t* w, int64_t words, const VecI* zeros, uint32_t* to) {
  constexpr int kPairs = 16 / kBits;
  VecI zero_pairs[kPanelInts];
#pragma GCC unroll 4
  for (int v = 0; v < kPanelInts; ++v) zero_pairs[v] = or_i(zeros[v], shift_left<16>(zeros[v]));
  for (int64_t u = 0; u < words; ++u) {
    __builtin_prefetch(reinterpret_cast<const char*>(w + u * kPanel) + kAhead);
#pragma GCC unroll 4
    for (int v = 0; v < kPanelInts; ++v) {
      const VecI word = load_i(w + u * kPanel + v * kLanes);
      const auto unpack = [&]<int kPair>() __attribute__((always_inline)) {
        store_i(to + (u * kPairs + kPair) * kPanel + v * kLanes,
                sub_halves(pair_of<kBits, kPair>(word), zero_pairs[v]));
      };
      unpack.template operator()<0>();
      unpack.template operator()<1>();
      if constexpr (kPairs == 4) {
        unpack.template operator()<2>();
        unpack.template operator()<3>();
      }
    }
  }
}

constexpr int64_t kBlockPairs = QuantizedInputs::kBlock / 2;

struct IntegerTile {
  const IntegerRows& x;
  const int32_t* pairs;  // of the tile's first row, in this block
  const uint32_t* w;     // [panels][kBlockPairs, 16]
  const float* scales;   // [panels][16]
  int64_t steps, row, block;
  float* sums;

  template <int kRows, int kPanels>
  __attribute__((noinline)) void run() const {
    constexpr int kVectors = kPanels * kPanelInts;
    VecI acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) acc[r][v] = set1_i(0);
    }
    for (int64_t k = 0; k < steps; ++k) {
      VecI unit[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        unit[v] = load_i(w + v / kPanelInts * kBlockPairs * kPanel + k * kPanel + v % kPanelInts * kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const VecI input = set1_i(pairs[r * x.stride + k]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_halves(acc[r][v], input, unit[v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const VecF factor = set1(x.scales[(row + r) * x.blocks + block]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        float* to = sums + r * kGroup * kPanel + v * kLanes;
        const VecF product = to_float(acc[r][v]) * factor, scale = load(scales + v * kLanes);
        store(to, block == 0 ? product * scale : fma(product, scale, load(to)));
      }
    }
  }
};

// sums[rows][kGroup * 16] = integer rows by panels.
inline void multiply_integers(const QuantizedWeight& weight, const IntegerRows& x, int64_t rows, int64_t panel,
                              int64_t panels, float* sums) {
  if (rows <= kFewQuantizedRows) {
    return weight.bits == 4 ? multiply_few_rows<kFewQuantizedRows, 4>(rows, weight, x, panel, panels, sums)
                            : multiply_few_rows<kFewQuantizedRows, 8>(rows, weight, x, panel, panels, sums);
  }
  alignas(64) uint32_t unpacked[kGroup * kBlockPairs * kPanel];
  alignas(64) float scales[kGroup * kPanel];
  const int64_t word_inputs = 32 / weight.bits;
  weight.for_blocks([&](int64_t group, int64_t block, int64_t begin, int64_t end) {
    const int64_t first = begin / word_inputs, words = (end + word_inputs - 1) / word_inputs - first;
    for (int64_t p = 0; p < panels; ++p) {
      VecI zeros[kPanelInts];
      for (int v = 0; v < kPanelInts; ++v) {
        zeros[v] = weight.load_zeros(panel + p, group, v * kLanes);
        store(scales + p * kPanel + v * kLanes, weight.load_scales(panel + p, group, v * kLanes));
      }
      const uint32_t* w = weight.panel_codes(panel + p) + first * kPanel;
      uint32_t* to = unpacked + p * kBlockPairs * kPanel;
      weight.bits == 4 ? unpack_pairs<4>(w, words, zeros, to) : unpack_pairs<8>(w, words, zeros, to);
    }
    const int64_t steps = words * (16 / weight.bits);
    for_tiles(rows, panels, [&](int64_t row, int64_t p) {
      return IntegerTile{x,
                         x.pairs + row * x.stride + begin / 2,
                         unpacked + p * kBlockPairs * kPanel,
                         scales + p * kPanel,
                         steps,
                         row,
                         block,
                         sums + (row * kGroup + p) * kPanel};
    });
  });
}

// The floats of codes with zeros and scales, kLanes of them.
template <Code kCode>
inline VecF float_of(VecI code, VecF zero, VecF scale) {
  if constexpr (kCode != Code::kFloat8E4m3) return (to_float(code) - zero) * scale;
  // exponent and mantissa shifted to those of a float, whose bias is larger by 120; the largest is NaN
  const VecF magnitude = as_float(shift_left<20>(and_i(code, set1_i(0x7f)))) * set1(0x1p120f);
  const VecF sign = as_float(or_i(shift_left<24>(and_i(code, set1_i(0x80))), set1_i(0x3f800000)));
  return select(gt(magnitude, set1(479.0f)), set1(__builtin_nanf("")), magnitude) * sign * scale;
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
    for (int64_t k = 0; k < stride; k += 4) {
      const Input second = to[k + 1];
      to[k + 1] = to[k + 2];
      to[k + 2] = second;
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

struct Int8Tile {
  const Int8LinearArgs& a;
  const int32_t* x;
  int64_t x_stride;
  const int32_t* totals;
  int64_t row, panel, words;
  float* sums;

  template <int kRows, int kPanels>
  __attribute__((noinline)) void run() const {
    constexpr int kVectors = kPanels * kPanelInts;
    VecI acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) acc[r][v] = set1_i(0);
    }
    const uint32_t* w = a.codes + panel * words * kPanel;
    for (int64_t u = 0; u < words; ++u) {
      VecI word[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t* from = w + v / kPanelInts * words * kPanel + u * kPanel + v % kPanelInts * kLanes;
        word[v] = load_i(from);
        if (v % kPanelInts == 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const int32_t* units = x + r * x_stride + u * Int8Dot::kUnits;
        if constexpr (kHasByteDots) {
          const VecI input = set1_i(*units);
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_bytes(acc[r][v], word[v], input);
        } else {
          const VecI even = set1_i(units[0]), odd = set1_i(units[1]);
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) {
            acc[r][v] = dot_halves(acc[r][v], even, pair_of<8, 0>(word[v]));
            acc[r][v] = dot_halves(acc[r][v], odd, pair_of<8, 1>(word[v]));
          }
        }
      }
    }
    alignas(64) int32_t weight_sums[kPanels * kPanel] = {};
    const int64_t first = panel * kPanel;
    if (a.q_offsets != nullptr) {
      __builtin_memcpy(weight_sums, a.sums + first,
                       std::min<int64_t>(kPanels * kPanel, a.out_features - first) * sizeof(int32_t));
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const VecI middle = set1_i(128 * totals[r]);  // as codes are the weights + 128
      const VecI offset = set1_i(a.q_offsets == nullptr ? 0 : a.q_offsets[row + r]);
      const VecF factor = set1(a.q_scales[row + r]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const VecI shift = mul_i(offset, load_i(weight_sums + v * kLanes));
        const VecI total = sub_i(sub_i(acc[r][v], middle), shift);
        store(sums + r * kGroup * kPanel + v * kLanes,
              to_float(total) * (factor * load(a.scales + first + v * kLanes)));
      }
    }
  }
};

// sums[rows][kGroup * 16] = rows from `row` on by panels.
inline void multiply_int8(const Int8LinearArgs& a, const int32_t* x, int64_t x_stride, const int32_t* totals,
                          int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) {
  for_tiles(rows, panels, [&](int64_t first, int64_t p) {
    return Int8Tile{a,
                    x + first * x_stride,
                    x_stride,
                    totals + first,
                    row + first,
                    panel + p,
                    (a.in_features + 3) / 4,
                    sums + (first * kGroup + p) * kPanel};
  });
}

}  // namespace
}  // namespace ascend_vllm
