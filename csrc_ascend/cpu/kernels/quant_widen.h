// Weights in codes as bfloat16 numbers, for rows of bfloat16 and AMX.
//
// Numbers are `code - zero`, which is exact. A block of at most kTileBlockInputs inputs of a group is one chain
// of products; blocks are scaled and added in float32 in the order of the inputs, so a row's result does not
// depend on the other rows.
#pragma once

#ifdef __AMX_BF16__

namespace ascend_vllm {
namespace {

constexpr int64_t kStepInputs = QuantizedInputs::kStep;  // that are widened at a time
constexpr int64_t kStepSize = kStepInputs * kPanel;
constexpr int64_t kTileBlockInputs = 896;  // maximum inputs of a block, and of a slice
constexpr int64_t kBlockSteps = kTileBlockInputs / kStepInputs;
constexpr int64_t kCodesAhead = 4096;  // prefetch distance, in bytes

// Bytes that a word's 16 outputs become: 2 rows of a tile for 8 bits, 4 for 4 bits.
template <Code kCode>
struct Widen;

template <>
struct Widen<Code::kUint8> {
  VecF first, second;  // what floats of codes in the lowest and in the second byte are too large by
  explicit Widen(const QuantizedWeight& weight, int64_t panel, int64_t group) {
    const VecF zero = to_float(weight.load_zeros(panel, group, 0));
    first = set1(0x1p23f) + zero;
    second = set1(0x1p15f) + zero;
  }
  static __m512i place(__m512i word, int mask, int exponent) {
    return _mm512_ternarylogic_epi32(word, _mm512_set1_epi32(mask), _mm512_set1_epi32(exponent), 0xea);
  }
  // Differences are whole numbers below 256, which leave the lower half of a float empty.
  static __m512i join(VecF even, VecF odd) {
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
  }
  void operator()(const uint32_t* codes, bfloat16* to) const {
    const __m512i low = (__m512i)load_i(codes), high = _mm512_srli_epi32(low, 16);
    const auto number = [](__m512i word, int mask, int exponent) {
      return _mm512_castsi512_ps(place(word, mask, exponent));
    };
    const __m512i pair0 = join(number(low, 0xff, 0x4b000000) - first, number(high, 0xff, 0x4b000000) - first);
    const __m512i pair1 =
        join(number(low, 0xff00, 0x47000000) - second, number(high, 0xff00, 0x47000000) - second);
    _mm512_storeu_si512(to, pair0);
    _mm512_storeu_si512(to + kStepInputs, pair1);
  }
};

// bfloat16 numbers of 0..15 and, as 5-bit two's complements, of -16..-1.
struct NibbleTable {
  alignas(64) uint16_t bits[32];
  constexpr explicit NibbleTable(bool from_middle) : bits{} {
    for (int i = 0; i < 32; ++i) {
      const int value = from_middle ? i % 16 - 8 : i < 16 ? i : i - 32;
      if (value == 0) continue;
      const int size = value < 0 ? -value : value;
      const int lead = size < 2 ? 0 : size < 4 ? 1 : size < 8 ? 2 : size < 16 ? 3 : 4;
      bits[i] =
          static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (lead + 127) << 7 | (size << (7 - lead) & 0x7f));
    }
  }
};
constexpr NibbleTable kNibbles(false), kCenteredNibbles(true);

template <>
struct Widen<Code::kUint4> {
  bool has_zeros;
  __m512i table, zeros;
  explicit Widen(const QuantizedWeight& weight, int64_t panel, int64_t group)
      : has_zeros(weight.zeros != nullptr),
        table(_mm512_load_si512(has_zeros ? kNibbles.bits : kCenteredNibbles.bits)) {
    const VecI zero = weight.load_zeros(panel, group, 0);
    zeros = (__m512i)or_i(zero, shift_left<16>(zero));
  }
  void operator()(const uint32_t* codes, bfloat16* to) const {
    const __m512i word = (__m512i)load_i(codes);
    const auto widen = [&](int row, __m512i pair) __attribute__((always_inline)) {
      if (has_zeros) pair = _mm512_sub_epi16(_mm512_and_si512(pair, _mm512_set1_epi32(0x000f000f)), zeros);
      _mm512_storeu_si512(to + row * kStepInputs, _mm512_permutexvar_epi16(pair, table));
    };
    widen(0, word);
    widen(1, _mm512_srli_epi32(word, 4));
    widen(2, _mm512_srli_epi32(word, 8));
    widen(3, _mm512_srli_epi32(word, 12));
  }
};

template <>
struct Widen<Code::kFloat8E4m3> {
  explicit Widen(const QuantizedWeight&, int64_t, int64_t) {}
  void operator()(const uint32_t* codes, bfloat16* to) const {
    const VecI word = load_i(codes);
    _mm512_storeu_si512(to, (__m512i)widen_float8(pair_of<8, 0>(word)));
    _mm512_storeu_si512(to + kStepInputs, (__m512i)widen_float8(pair_of<8, 1>(word)));
  }
};

// The weights of one step, 512 bfloat16 numbers, of `words` words; zeros behind them. Codes `ahead` bytes
// further on are prefetched.
template <Code kCode>
inline void widen_step(const Widen<kCode>& widen, const uint32_t* codes, int64_t words, int64_t ahead,
                       bfloat16* to) {
  constexpr int kWords = kCode == Code::kUint4 ? 4 : 8;
  constexpr int64_t kSize = kStepSize / kWords;
  if (words >= kWords) {
#pragma GCC unroll 8
    for (int u = 0; u < kWords; ++u) {
      __builtin_prefetch(reinterpret_cast<const char*>(codes + u * kPanel) + ahead);
      widen(codes + u * kPanel, to + u * kSize);
    }
    return;
  }
  for (int64_t u = 0; u < words; ++u) widen(codes + u * kPanel, to + u * kSize);
  __builtin_memset(to + words * kSize, 0, (kWords - words) * kSize * sizeof(bfloat16));
}

// A block of inputs: a group, or a part of it.
struct TileBlock {
  int64_t group, begin, end;  // inputs
  int64_t step;               // its first one among all of a row
  int64_t steps() const { return (end - begin + kStepInputs - 1) / kStepInputs; }
};

inline TileBlock first_block(const QuantizedWeight& weight) {
  return {0, 0, std::min({weight.in_features, weight.group_size, kTileBlockInputs}), 0};
}

// Calls body(block) for each.
template <class Body>
inline void for_tile_blocks(const QuantizedWeight& weight, const Body& body) {
  int64_t step = 0;
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t last = std::min(weight.in_features, (group + 1) * weight.group_size);
    for (int64_t begin = group * weight.group_size; begin < last; begin += kTileBlockInputs) {
      const TileBlock block{group, begin, std::min(last, begin + kTileBlockInputs), step};
      body(block);
      step += block.steps();
    }
  }
}

// Blocks of inputs that are widened together, at most kBlockSteps steps.
struct TileSlice {
  TileBlock blocks[kBlockSteps];
  int64_t count = 0, steps = 0;
  int64_t chain_steps(int64_t block) const { return blocks[block].steps(); }
};

// The slice behind another one, or the first; empty if there is none.
inline TileSlice slice_after(const QuantizedWeight& weight, const TileSlice& slice) {
  TileSlice next;
  int64_t begin = 0, step = 0;
  if (slice.count > 0) {
    const TileBlock& last = slice.blocks[slice.count - 1];
    begin = last.end;
    step = last.step + last.steps();
  }
  while (begin < weight.in_features) {
    const int64_t group = begin / weight.group_size;
    const int64_t end =
        std::min({weight.in_features, (group + 1) * weight.group_size, begin + kTileBlockInputs});
    const TileBlock block{group, begin, end, step};
    if (next.steps + block.steps() > kBlockSteps) break;
    next.blocks[next.count++] = block;
    next.steps += block.steps();
    step += block.steps();
    begin = end;
  }
  return next;
}

// A row of x as the products read it: each block of inputs is padded with zeros to whole steps.
inline void copy_steps(const QuantizedLinearArgs& a, const QuantizedWeight& weight, const bfloat16* x,
                       bfloat16* to) {
  for_tile_blocks(weight, [&](const TileBlock& block) {
    bfloat16* own = to + block.step * kStepInputs;
    const int64_t count = block.end - block.begin;
    if (a.order == nullptr) {
      __builtin_memcpy(own, x + block.begin, count * sizeof(bfloat16));
    } else {
      for (int64_t i = 0; i < count; ++i) own[i] = x[a.order[block.begin + i]];
    }
    __builtin_memset(own + count, 0, (block.steps() * kStepInputs - count) * sizeof(bfloat16));
  });
}

// Where rows of numbers start, and how far they are from one another, in floats.
struct FloatRows {
  float* first;
  int64_t stride;
};

// sums[rows][16] (+)= products[rows][16] * the scales of a panel's group.
inline void add_scaled(const QuantizedWeight& weight, int64_t panel, int64_t group, bool is_first,
                       FloatRows products, int64_t rows, FloatRows sums) {
  const VecF scale = weight.load_scales(panel, group, 0);
  for (int64_t r = 0; r < rows; ++r, products.first += products.stride, sums.first += sums.stride) {
    const VecF product = load(products.first);
    store(sums.first, is_first ? product * scale : fma(product, scale, load(sums.first)));
  }
}

// Widens the steps of panels one after another.
template <Code kCode, int kPanels>
class StepWidener {
 public:
  static constexpr int64_t kWords = kCode == Code::kUint4 ? 4 : 8;
  using Step = bfloat16[kPanels][kStepSize];

  // Panels from `panel` on, of which none is behind `last`.
  StepWidener(const QuantizedWeight& weight, int64_t panel, int64_t last, const TileBlock& first)
      : weight_(&weight), panel_(panel), last_(last), panel_bytes_(weight.words * kPanel * 4) {
    begin(first.group, first.begin);
  }
  StepWidener(const QuantizedWeight& weight, int64_t panel, const TileBlock& first)
      : StepWidener(weight, panel, panel + kPanels - 1, first) {}
  bool is_done() const { return is_done_; }
  // Widens one step of all panels, and goes on to the next.
  void widen(Step& to) { widen(to[0], kStepSize); }
  // The same for panels that are so many numbers apart.
  void widen(bfloat16* to, int64_t panel_size) {
    const int64_t left = panel_bytes_ - word_ * kPanel * 4;
    // a panel is followed by the next one of these in memory
    const int64_t ahead = left > kCodesAhead ? kCodesAhead : kCodesAhead + (kPanels - 1) * panel_bytes_;
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const int64_t panel = std::min(panel_ + p, last_);
      const Widen<kCode> widen(*weight_, panel, group_);
      widen_step(widen, weight_->panel_codes(panel) + word_ * kPanel, words_end_ - word_, ahead,
                 to + p * panel_size);
    }
    word_ += kWords;
    if (word_ < words_end_) return;
    if (end_ < weight_->in_features) {
      begin(end_ == (group_ + 1) * weight_->group_size ? group_ + 1 : group_, end_);
    } else {
      is_done_ = true;
    }
  }

 private:
  void begin(int64_t group, int64_t first) {
    group_ = group;
    end_ = std::min({weight_->in_features, (group + 1) * weight_->group_size, first + kTileBlockInputs});
    word_ = first * weight_->bits / 32;
    words_end_ = (end_ * weight_->bits + 31) / 32;
  }
  const QuantizedWeight* weight_;
  int64_t panel_, last_, panel_bytes_;
  int64_t group_, end_, word_, words_end_;
  bool is_done_ = false;
};

// Calls body with the code of a weight as a template argument.
template <class Body>
inline void with_code(Code code, const Body& body) {
  switch (code) {
    case Code::kUint4:
      return body.template operator()<Code::kUint4>();
    case Code::kUint8:
      return body.template operator()<Code::kUint8>();
    case Code::kFloat8E4m3:
      return body.template operator()<Code::kFloat8E4m3>();
  }
}

}  // namespace
}  // namespace ascend_vllm

#endif
