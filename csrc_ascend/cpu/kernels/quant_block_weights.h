// What quant_blocks.h multiplies: slices of inputs in tiles, and weights that are tiles as they are or become
// some.
#pragma once

#if defined(ASCEND_VLLM_ISA) && defined(__AMX_BF16__)

namespace ascend_vllm {
namespace {

// A thread's memory for a product of many rows.
struct QuantizedTileMemory {
  alignas(64) char packed[TileMemory::kPackedBytes];
  alignas(64) float sums[TileMemory::kMostSums * kBlockSums];
  alignas(64) float gates[kMostTaskRows / kTileBlock * kBlockSums];
  alignas(64) bfloat16 widened[2][2][kBlockSteps * kStepSize];  // of two pairs of panels
  alignas(64) float scales[2][kBlockSteps][2][kPanel];          // of their groups
  int32_t totals[kMostTaskRows];                                // sums of the rows of blocks
  int64_t call = 0, row = 0;                                    // whose rows `packed` and `totals` have
};

// This thread's, made when first used.
inline QuantizedTileMemory& quantized_tile_memory() {
  struct Owner {
    QuantizedTileMemory* const memory = new QuantizedTileMemory;
    ~Owner() { delete memory; }
  };
  thread_local const Owner owner;
  return *owner.memory;
}

// Tiles of two panels, or of one twice.
struct TilePair {
  const char* first;
  const char* second;

  TilePair from(int64_t step) const { return {first + step * kTileBytes, second + step * kTileBytes}; }
};

// Two panels of a weight, or one twice.
struct PairOfPanels {
  int64_t first, second;
};

// Rows of 8-bit numbers by 8-bit weights, whose panels are tiles as they are.
template <class T>
class ByteTiles {
 public:
  using Args = Int8LinearArgs;
  using Result = T;
  static constexpr int64_t kInputs = kByteInputs;  // of a tile

  // Some inputs, in one chain.
  struct Slice {
    int64_t begin = 0, end = 0, step = 0, steps = 0;
    static constexpr int64_t count = 1;
    int64_t chain_steps(int64_t) const { return steps; }
  };

  ByteTiles(const Args& args, QuantizedTileMemory& memory)
      : a_(args), memory_(memory), words_((args.in_features + 3) / 4) {}

  static int64_t steps_of(const Args& a) { return (a.in_features + kInputs - 1) / kInputs; }

  Slice after(const Slice& slice) const {
    const int64_t end = std::min(a_.in_features, slice.end + kSliceSteps * kInputs);
    return {slice.end, end, slice.step + slice.steps, (end - slice.end + kInputs - 1) / kInputs};
  }

  // Copies a row's inputs of a slice to rows of tiles, in the order of words, and adds them to its total.
  void pack(const Slice& slice, int64_t row, int64_t place, char* to) const {
    const __m512i order = _mm512_set4_epi32(0x0f0d0e0c, 0x0b090a08, 0x07050604, 0x03010200);
    const int8_t* x = a_.q + row * a_.in_features;
    __m512i total = _mm512_setzero_si512();
    for (int64_t k = slice.begin; k < slice.end; k += kInputs, to += kBlockBytes) {
      const int64_t rest = slice.end - k;
      const __mmask64 mask = rest >= kInputs ? ~__mmask64{0} : (__mmask64{1} << rest) - 1;
      const __m512i line = _mm512_maskz_loadu_epi8(mask, x + k);
      _mm512_store_si512(to, _mm512_shuffle_epi8(line, order));
      total = _mm512_dpbusd_epi32(total, _mm512_set1_epi8(1), line);
    }
    int32_t& sum = memory_.totals[place];
    sum = (slice.begin == 0 ? 0 : sum) + _mm512_reduce_add_epi32(total);
  }

  // Prepares the weights of a slice, at once or in the steps that follow: each of them is for 1 / `blocks` of a
  // tile. The first of a slice, or those for which there was no time, are prepared by finish().
  void begin(const Slice& slice, const PairOfPanels& pair, int64_t blocks) {
    next_ = pair;
    next_slice_ = slice;
    fetch_ = Fetch(lines_of(slice, pair), 0, slice.steps);
    lines_ = (kTileHeight + blocks - 1) / blocks;
  }
  [[gnu::always_inline]] void step() { fetch_.some(lines_); }
  // The pair that was prepared is multiplied now.
  void finish() {
    fetch_.all();
    now_ = next_;
    const Slice& slice = next_slice_;
    first_ = lines_of(slice, now_);
    const int64_t inputs = (slice.end - slice.begin) % kInputs;
    complete_ = slice.steps - (inputs > 0 ? 1 : 0);
    if (inputs == 0) return;
    __builtin_memset(rest_, 0, sizeof rest_);
    const PanelPair last = first_.from(complete_);
    __builtin_memcpy(rest_[0], last.first, (inputs + 3) / 4 * kTileRowBytes);
    __builtin_memcpy(rest_[1], last.second, (inputs + 3) / 4 * kTileRowBytes);
    finish_writes();
  }

  TilePair weights(int64_t) const {
    return {reinterpret_cast<const char*>(first_.first), reinterpret_cast<const char*>(first_.second)};
  }
  // Tiles that are complete, and the one behind them.
  int64_t complete_steps(int64_t) const { return complete_; }
  TilePair rest() const { return {rest_[0], rest_[1]}; }

  [[gnu::always_inline]] static void multiply_first_by_first() { _tile_dpbsud(0, 4, 6); }
  [[gnu::always_inline]] static void multiply_second_by_first() { _tile_dpbsud(2, 5, 6); }
  [[gnu::always_inline]] static void multiply_second_by_second() { _tile_dpbsud(3, 5, 7); }
  [[gnu::always_inline]] static void multiply_first_by_second() { _tile_dpbsud(1, 4, 7); }

  // What products of a chain become.
  class Sums {
   public:
    Sums() = default;
    Sums(const ByteTiles& tiles, int64_t) : tiles_(&tiles), pair_(tiles.now_) {}

    [[gnu::always_inline]] void add(bool is_first, const float* products, float* sums, int64_t) const {
      store_i(reinterpret_cast<int32_t*>(sums), sum(is_first, products, sums));
    }
    [[gnu::always_inline]] VecF result(bool is_first, const float* products, const float* sums, int64_t panel,
                                       int64_t row, int64_t place) const {
      const Int8Results results(tiles_->a_, panel == 0 ? pair_.first : pair_.second);
      return results.of(sum(is_first, products, sums), tiles_->memory_.totals[place], row, 0);
    }

   private:
    static VecI sum(bool is_first, const float* products, const float* sums) {
      const VecI own = load_i(reinterpret_cast<const int32_t*>(products));
      return is_first ? own : add_i(own, load_i(reinterpret_cast<const int32_t*>(sums)));
    }
    const ByteTiles* tiles_ = nullptr;
    PairOfPanels pair_{};
  };

 private:
  using Fetch = PanelFetch<_MM_HINT_T1>;

  PanelPair lines_of(const Slice& slice, const PairOfPanels& pair) const {
    const auto panel = [&](int64_t index) {
      return reinterpret_cast<const bfloat16*>(a_.codes + (index * words_ + slice.begin / 4) * kPanel);
    };
    return {panel(pair.first), panel(pair.second)};
  }

  const Args& a_;
  QuantizedTileMemory& memory_;
  const int64_t words_;
  PairOfPanels now_{}, next_{};
  Slice next_slice_{};
  PanelPair first_{};
  int64_t complete_ = 0, lines_ = 0;
  Fetch fetch_{{}, 0, 0};
  alignas(64) char rest_[2][kTileBytes];
};

// Rows of bfloat16 by weights in codes, which are widened.
template <Code kCode>
class CodeTiles {
 public:
  using Args = QuantizedLinearArgs;
  using Result = bfloat16;
  using Slice = TileSlice;
  static constexpr int64_t kInputs = kStepInputs;

  CodeTiles(const Args& args, QuantizedTileMemory& memory)
      : a_(args), weight_(args), memory_(memory), widener_(weight_, 0, 0, first_block(weight_)) {}

  static int64_t steps_of(const Args& a) {
    const int64_t groups = (a.in_features + a.group_size - 1) / a.group_size;
    const auto steps = [](int64_t inputs) { return (inputs + kInputs - 1) / kInputs; };
    return (groups - 1) * steps(a.group_size) + steps(a.in_features - (groups - 1) * a.group_size);
  }

  Slice after(const Slice& slice) const { return slice_after(weight_, slice); }

  void pack(const Slice& slice, int64_t row, int64_t, char* to) const {
    const bfloat16* x = static_cast<const bfloat16*>(a_.x) + row * a_.x_stride;
    for (int64_t b = 0; b < slice.count; ++b) {
      const TileBlock& block = slice.blocks[b];
      for (int64_t k = block.begin; k < block.end; k += kInputs, to += kBlockBytes) {
        const int64_t count = std::min(kInputs, block.end - k);
        if (a_.order != nullptr) {
          alignas(64) bfloat16 line[kInputs] = {};
          for (int64_t i = 0; i < count; ++i) line[i] = x[a_.order[k + i]];
          _mm512_store_si512(to, _mm512_load_si512(line));
        } else {
          const __mmask32 mask = count == kInputs ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
          _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, x + k));
        }
      }
    }
  }

  void begin(const Slice& slice, const PairOfPanels& pair, int64_t blocks) {
    const int64_t place = 1 - place_;
    for (int64_t b = 0; b < slice.count; ++b) {
      store(memory_.scales[place][b][0], weight_.load_scales(pair.first, slice.blocks[b].group, 0));
      store(memory_.scales[place][b][1], weight_.load_scales(pair.second, slice.blocks[b].group, 0));
    }
    widener_ = Widener(weight_, pair.first, pair.second, slice.blocks[0]);
    to_ = memory_.widened[place][0];
    left_ = slice.steps;
    wait_ = interval_ = blocks;
  }
  [[gnu::always_inline]] void step() {
    if (--wait_ > 0 || left_ == 0) return;
    wait_ = interval_;
    widen();
  }
  void finish() {
    while (left_ > 0) widen();
    place_ = 1 - place_;
    finish_writes();
  }

  TilePair weights(int64_t first_step) const {
    const auto panel = [&](int p) { return reinterpret_cast<const char*>(memory_.widened[place_][p]); };
    return TilePair{panel(0), panel(1)}.from(first_step);
  }
  int64_t complete_steps(int64_t steps) const { return steps; }
  TilePair rest() const { return {}; }

  [[gnu::always_inline]] static void multiply_first_by_first() { _tile_dpbf16ps(0, 4, 6); }
  [[gnu::always_inline]] static void multiply_second_by_first() { _tile_dpbf16ps(2, 5, 6); }
  [[gnu::always_inline]] static void multiply_second_by_second() { _tile_dpbf16ps(3, 5, 7); }
  [[gnu::always_inline]] static void multiply_first_by_second() { _tile_dpbf16ps(1, 4, 7); }

  class Sums {
   public:
    Sums() = default;
    Sums(const CodeTiles& tiles, int64_t chain) {
      for (int p = 0; p < 2; ++p) scales_[p] = load(tiles.memory_.scales[tiles.place_][chain][p]);
    }

    [[gnu::always_inline]] void add(bool is_first, const float* products, float* sums, int64_t panel) const {
      store(sums, sum(is_first, products, sums, panel));
    }
    [[gnu::always_inline]] VecF result(bool is_first, const float* products, const float* sums, int64_t panel,
                                       int64_t, int64_t) const {
      return sum(is_first, products, sums, panel);
    }

   private:
    VecF sum(bool is_first, const float* products, const float* sums, int64_t panel) const {
      const VecF product = load(products), scale = scales_[panel];
      return is_first ? product * scale : fma(product, scale, load(sums));
    }
    VecF scales_[2]{};
  };

 private:
  using Widener = StepWidener<kCode, 2>;

  void widen() {
    widener_.widen(to_, kBlockSteps * kStepSize);
    to_ += kStepSize;
    --left_;
  }

  const Args& a_;
  const QuantizedWeight weight_;
  QuantizedTileMemory& memory_;
  Widener widener_;
  bfloat16* to_ = nullptr;
  int64_t place_ = 0, left_ = 0, wait_ = 0, interval_ = 1;
};

}  // namespace
}  // namespace ascend_vllm

#endif
