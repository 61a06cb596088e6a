// Many rows by quantized weights with AMX, in the blocks of gemm_tiles.h: 32 rows by two panels, which are four
// tiles of sums. Inputs are copied tile by tile for the L2 cache, and a slice of them is multiplied by one pair
// of panels after the other. Weights that are not tiles as they are become some there: those of the next pair
// are widened while this one is multiplied by all rows of the task.
//
// A slice has one chain of products or several, each with scales of its own. What a chain's sums become
// (scaled, added to those of the chains before it, and in the end a result) is computed while the next one is
// multiplied.
#pragma once

#if defined(ASCEND_VLLM_ISA) && defined(__AMX_BF16__)

#include <atomic>

#include "cpu/kernels/quant_block_weights.h"

namespace ascend_vllm {
namespace {

// Products with fewer rows are memory-bound, see quant_amx.h and quant_amx_int8.h.
constexpr int64_t kMinBlockedRows = 2 * kTileBlock + 1;
// Inputs of the groups of gated weights. With groups of 128, quant_amx.h takes 0.93 of the time.
constexpr int64_t kMinGatedGroup = 512;

// A number that no other call of a product has.
inline int64_t next_call() {
  static std::atomic<int64_t> calls{0};
  return ++calls;
}

// What a block's chains of products become, some rows at a time, while the next chain is multiplied.
template <class Weights>
class BlockSums {
 public:
  using T = typename Weights::Result;
  // Products of a chain that are added to `sums`, and if they are the last ones, written to columns of the
  // result.
  struct Chain {
    typename Weights::Sums products_of;
    bool is_first, is_last, is_gate;
    int64_t block, column, panels;
    float* sums;
    float* gates;  // of the block, with the activation applied
  };

  BlockSums(const LinearArgs& out, const float* bias, const TaskRows& rows)
      : out_(out),
        bias_(bias),
        rows_(rows),
        streams_(sizeof(T) == 2 && out.rows * out.out_stride * 2 >= kStreamedBytes &&
                 (reinterpret_cast<uintptr_t>(out.out) | out.out_stride * 2) % 64 == 0) {}

  // Memory for the products of a chain.
  float* next(const Chain& chain) {
    finish();
    chain_ = chain;
    products_ = products_ == buffer_[0] ? buffer_[1] : buffer_[0];
    left_ = kTileBlock;
    if (chain.is_last) choose_columns();
    return products_;
  }

  // How many steps there are until the next chain. The first ones wait for the products.
  void pace(int64_t steps) {
    pause_ = std::min(kMostPause, std::max<int64_t>(0, steps - 1) / 2);
    rows_of_step_ = steps == 0 ? 0 : (kTileBlock + steps - pause_ - 1) / (steps - pause_);
  }
  [[gnu::always_inline]] void step() {
    if (pause_ > 0) {
      --pause_;
    } else {
      work(std::min(left_, rows_of_step_));
    }
  }

  void finish() { work(left_); }

  void finish_all() {
    finish();
    if (streams_) _mm_sfence();
  }

 private:
  static constexpr int64_t kMostPause = 6;

  // Those of the result, and their biases.
  void choose_columns() {
    const int64_t width = out_.is_gated ? out_.out_features / 2 : out_.out_features;
    columns_ = std::min(chain_.panels * kPanel, width - chain_.column);
    if (bias_ != nullptr) {
      const float* from = bias_ + chain_.column + (out_.is_gated && !chain_.is_gate ? width : 0);
      __builtin_memcpy(biases_, from, columns_ * sizeof(float));
    }
  }

  [[gnu::always_inline]] void work(int64_t rows) {
    if (rows <= 0) return;
    const int64_t end = left_, begin = end - rows;
    left_ = begin;
    if (chain_.is_last) {
      for (int64_t r = begin; r < end; ++r) write(r);
      return;
    }
    for (int64_t at = begin * kSumsRow; at < end * kSumsRow; at += kSumsRow) {
      chain_.products_of.add(chain_.is_first, products_ + at, chain_.sums + at, 0);
      chain_.products_of.add(chain_.is_first, products_ + at + kPanel, chain_.sums + at + kPanel, 1);
    }
  }

  // The last chain's row of a block.
  void write(int64_t r) const {
    const int64_t row =
        r < kTileHeight ? rows_.first_row(chain_.block) + r : rows_.second_row(chain_.block) + r - kTileHeight;
    const int64_t at = r * kSumsRow;
    VecF values[2];
    for (int p = 0; p < 2; ++p) {
      const int64_t own = at + p * kPanel;
      values[p] = chain_.products_of.result(chain_.is_first, products_ + own, chain_.sums + own, p, row,
                                            chain_.block * kTileBlock + r);
      if (bias_ != nullptr) values[p] = values[p] + load(biases_ + p * kPanel);
    }
    if (chain_.is_gate) {
      return with_gate<T>(out_.gate, [&](auto activation) {
        for (int p = 0; p < 2; ++p) store(chain_.gates + at + p * kPanel, activation(rounded<T>(values[p])));
      });
    }
    if (out_.is_gated) {
      for (int p = 0; p < 2; ++p) values[p] = load(chain_.gates + at + p * kPanel) * rounded<T>(values[p]);
    }
    T* out = static_cast<T*>(out_.out) + row * out_.out_stride + chain_.column;
    if constexpr (is_same<T, bfloat16>) {
      if (columns_ == 2 * kPanel) {
        const auto line = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values[1], values[0]));
        void* to = out;
        if (streams_ && chain_.column % kSumsRow == 0)
          return _mm512_stream_si512(static_cast<__m512i*>(to), line);
        return _mm512_storeu_si512(to, line);
      }
    }
    for (int p = 0; p < 2; ++p) {
      const int64_t columns = columns_ - p * kPanel;
      if (columns >= kPanel) {
        store(out + p * kPanel, values[p]);
      } else if (columns > 0) {
        store_n(out + p * kPanel, values[p], static_cast<int>(columns));
      }
    }
  }

  const LinearArgs& out_;
  const float* const bias_;
  const TaskRows& rows_;
  const bool streams_;
  Chain chain_{};
  float* products_ = nullptr;
  int64_t columns_ = 0, left_ = 0, pause_ = 0, rows_of_step_ = 0;
  alignas(64) float buffer_[2][kBlockSums];
  alignas(64) float biases_[2 * kPanel] = {};
};

// Rows [row, row + rows), at least 32, by the panels [panel, panel + panels), or by so many panels of both
// halves if gated. If there are several slices, there are at most TileMemory::kMostSums blocks by pairs.
template <class Weights>
class BlockedTask {
 public:
  using Args = typename Weights::Args;
  using Slice = typename Weights::Slice;

  BlockedTask(const Args& args, int64_t row, int64_t rows, int64_t panel, int64_t panels)
      : a_(args),
        out_(result_of(args)),
        panel_(panel),
        panels_(panels),
        pairs_((panels + 1) / 2 * (args.is_gated ? 2 : 1)),
        rows_(out_, row, rows),
        weights_(args, memory_),
        sums_(out_, args.bias, rows_) {}

  // `call`: a number of its own, for all tasks of a product, which share their copies of inputs.
  void run(int64_t call) {
    const Tiles tiles;
    const int64_t all_steps = Weights::steps_of(a_);
    const bool keeps_all = rows_.packed_bytes(all_steps) <= TileMemory::kPackedBytes;
    const bool has_all = keeps_all && memory_.call == call && memory_.row == rows_.row();
    memory_.call = keeps_all ? call : 0;
    memory_.row = rows_.row();
    Slice slice = weights_.after({});
    has_slices_ = slice.steps < all_steps;
    weights_.begin(slice, pair(0), rows_.blocks());
    for (int64_t step = 0; slice.steps > 0;) {
      const Slice next = weights_.after(slice);
      char* packed = memory_.packed + (keeps_all ? rows_.packed_bytes(step) : 0);
      if (!has_all) pack(slice, packed);
      for (int64_t i = 0; i < pairs_; ++i) {
        weights_.finish();
        if (i + 1 < pairs_) {
          weights_.begin(slice, pair(i + 1), rows_.blocks());
        } else if (next.steps > 0) {
          weights_.begin(next, pair(0), rows_.blocks());
        }
        for (int64_t block = 0; block < rows_.blocks(); ++block) {
          multiply(slice, packed + block * slice.steps * kBlockBytes, i, block, step == 0, next.steps == 0);
        }
      }
      step += slice.steps;
      slice = next;
    }
    store_sums<2>(sums_.next(before_));
    sums_.finish_all();
  }

 private:
  // With gates, every pair is followed by that of the other half.
  PairOfPanels pair(int64_t index) const {
    const int64_t half = a_.is_gated ? index % 2 * (a_.out_features / 2 / kPanel) : 0;
    const int64_t first = panel_ + panel_of(index) + half;
    return {first, panel_of(index) + 1 < panels_ ? first + 1 : first};
  }
  int64_t panel_of(int64_t index) const { return a_.is_gated ? index / 2 * 2 : index * 2; }

  // Sums that no other slice adds to are needed until the next block's, which are added later.
  float* sums_of(int64_t index, int64_t block) const {
    return memory_.sums + (has_slices_ ? index * rows_.blocks() + block : 0) * kBlockSums;
  }

  void pack(const Slice& slice, char* packed) const {
    for (int64_t block = 0; block < rows_.blocks(); ++block) {
      char* to = packed + block * slice.steps * kBlockBytes;
      for (int64_t r = 0; r < kTileBlock; ++r) {
        const int64_t row =
            r < kTileHeight ? rows_.first_row(block) + r : rows_.second_row(block) + r - kTileHeight;
        weights_.pack(slice, row, block * kTileBlock + r, to + r * kTileRowBytes);
      }
    }
    finish_writes();
  }

  void multiply(const Slice& slice, const char* x, int64_t index, int64_t block, bool is_first, bool is_last) {
    typename BlockSums<Weights>::Chain chain{};
    chain.is_gate = a_.is_gated && index % 2 == 0;
    chain.block = block;
    chain.column = (panel_ + panel_of(index)) * kPanel;
    chain.panels = std::min<int64_t>(2, panels_ - panel_of(index));
    chain.sums = sums_of(index, block);
    chain.gates = memory_.gates + block * kBlockSums;
    int64_t step = 0;
    for (int64_t c = 0; c < slice.count; ++c) {
      const int64_t steps = slice.chain_steps(c), complete = weights_.complete_steps(steps);
      const TilePair w = complete > 0 ? weights_.weights(step) : weights_.rest();
      begin_chain(x, w, has_before_ ? sums_.next(before_) : nullptr);
      sums_.pace(steps - 1);
      if (complete > 1) add_chain(x + kBlockBytes, w.from(1), complete - 1);
      if (complete > 0 && complete < steps) add_products(x + complete * kBlockBytes, weights_.rest(), 1);
      chain.products_of = typename Weights::Sums(weights_, c);
      chain.is_first = is_first && c == 0;
      chain.is_last = is_last && c + 1 == slice.count;
      before_ = chain;
      has_before_ = true;
      step += steps;
      x += steps * kBlockBytes;
    }
  }

  // The first step of a chain. The products of the chain before leave a tile just before its first new ones
  // come, so that nothing waits for those of all tiles.
  [[gnu::always_inline]] void begin_chain(const char* x, const TilePair& w, float* before) {
    constexpr int64_t kSecond = kTileHeight * kSumsRow;
    _tile_stream_loadd(4, x, kTileRowBytes);
    _tile_loadd(6, w.first, kTileRowBytes);
    if (before != nullptr) _tile_stored(0, before, kSumsRowBytes);
    _tile_zero(0);
    Weights::multiply_first_by_first();
    _tile_stream_loadd(5, x + kTileBytes, kTileRowBytes);
    if (before != nullptr) _tile_stored(2, before + kSecond, kSumsRowBytes);
    _tile_zero(2);
    Weights::multiply_second_by_first();
    _tile_stream_loadd(7, w.second, kTileRowBytes);
    weights_.step();
    if (before != nullptr) _tile_stored(3, before + kSecond + kPanel, kSumsRowBytes);
    _tile_zero(3);
    Weights::multiply_second_by_second();
    if (before != nullptr) _tile_stored(1, before + kPanel, kSumsRowBytes);
    _tile_zero(1);
    Weights::multiply_first_by_second();
    finish_writes();
  }
  // As those of gemm_tiles.h.
  [[gnu::always_inline]] void add_products(const char* x, TilePair w, int64_t steps) {
    for (; steps > 0; --steps, x += kBlockBytes, w = w.from(1)) {
      _tile_stream_loadd(4, x, kTileRowBytes);
      _tile_loadd(6, w.first, kTileRowBytes);
      Weights::multiply_first_by_first();
      _tile_stream_loadd(5, x + kTileBytes, kTileRowBytes);
      Weights::multiply_second_by_first();
      _tile_stream_loadd(7, w.second, kTileRowBytes);
      weights_.step();
      sums_.step();
      Weights::multiply_second_by_second();
      Weights::multiply_first_by_second();
    }
  }
  void add_chain(const char* x, const TilePair& w, int64_t steps) {
    constexpr int64_t kMostSteps = 16;
    alignas(64) char unused[kTileBytes];
    int64_t step = 0;
    for (; step + kMostSteps < steps; step += kMostSteps) {
      add_products(x + step * kBlockBytes, w.from(step), kMostSteps);
      _tile_stored(7, unused, kTileRowBytes);
    }
    add_products(x + step * kBlockBytes, w.from(step), steps - step);
  }

  const Args& a_;
  const LinearArgs out_;
  const int64_t panel_, panels_, pairs_;
  const TaskRows rows_;
  bool has_slices_ = false, has_before_ = false;
  typename BlockSums<Weights>::Chain before_{};  // whose products are in tiles
  QuantizedTileMemory& memory_ = quantized_tile_memory();
  Weights weights_;
  BlockSums<Weights> sums_;
};

// All of a product with at least kMinBlockedRows rows.
template <class Weights>
void multiply_blocked(const typename Weights::Args& a) {
  const int64_t all = (a.out_features + kPanel - 1) / kPanel, panels = a.is_gated ? all / 2 : all;
  const int64_t pairs = (panels + 1) / 2, steps = Weights::steps_of(a);
  const int threads = threads_for(a.rows * a.in_features * a.out_features / 8);
  const int64_t fitting = TileMemory::kPackedBytes / (steps * kBlockBytes) * kTileBlock;
  const bool fits = fitting >= kMostSlicedRows;
  const int64_t most_rows = fits ? std::min(fitting, kMostTaskRows) : kMostSlicedRows;
  const int64_t row_tasks = (a.rows + most_rows - 1) / most_rows;
  const int64_t blocks = ((a.rows + row_tasks - 1) / row_tasks + kTileBlock - 1) / kTileBlock;
  int64_t groups = ((fits ? kPackedTasks : 1) * threads + row_tasks - 1) / row_tasks;
  if (steps > kSliceSteps / 2) {
    const int64_t most_pairs = TileMemory::kMostSums / (blocks * (a.is_gated ? 2 : 1));
    groups = std::max(groups, (pairs + most_pairs - 1) / most_pairs);
  }
  groups = std::min((groups + threads - 1) / threads * threads, pairs);
  const int64_t call = next_call();
  const auto task = [&](int64_t index, int64_t) {
    const int64_t of_rows = index / groups, of_pairs = index % groups;
    const int64_t row = a.rows * of_rows / row_tasks, end = a.rows * (of_rows + 1) / row_tasks;
    const int64_t panel = pairs * of_pairs / groups * 2;
    const int64_t last = std::min(panels, pairs * (of_pairs + 1) / groups * 2);
    BlockedTask<Weights>(a, row, end - row, panel, last - panel).run(call);
  };
  if (threads == 1) {
    for (int64_t i = 0; i < row_tasks * groups; ++i) task(i, 0);
  } else {
    run_parts(row_tasks * groups, threads, task);
  }
}

}  // namespace
}  // namespace ascend_vllm

#endif
