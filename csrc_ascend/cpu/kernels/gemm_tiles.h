// The bfloat16 products of gemm_tasks.h with AMX tiles: 16 rows of 32 inputs times 16 pairs of inputs by 16
// outputs, which is the layout of panels.
//
// Every output is one chain of tile products in the order of the inputs, whatever the number of rows and
// threads, so a row's result does not depend on the other rows. Subnormal numbers are treated as zero, as the
// hardware does.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/isa/tiles.h"

namespace ascend_vllm {
namespace {

constexpr int64_t kTileInputs = 32;  // inputs of a tile
constexpr int64_t kTileBytes = kTileHeight * kTileRowBytes;
constexpr int64_t kTileBlock = 2 * kTileHeight;
constexpr int64_t kTilePanels = 4;  // maximum panels of a task
constexpr int64_t kTileColumns = kTilePanels * kPanel;
// The inputs of a task's rows should stay in the L2 cache while its panels are read.
constexpr int64_t kInputBytesOfTask = 5 << 18;
// Prefetch distance within a panel, in bytes: a few tiles.
constexpr int64_t kTileAhead = 4096;
// The same within a row of inputs: two tiles.
constexpr int64_t kInputsAhead = 128;

// Tiles 0 to 3 are sums. With two tiles of rows 4 and 5 are inputs, 6 and 7 weights; with one, 4 is inputs and
// 5 to 7 are weights.
inline void shape_tiles_for(int64_t first_rows, int64_t second_rows) {
  TileShapes shapes;
  const bool has_second = second_rows > 0;
  for (int tile = 0; tile < (has_second ? 6 : 5); ++tile) {
    const bool is_second = has_second && (tile == 2 || tile == 3 || tile == 5);
    shapes.rows[tile] = static_cast<uint8_t>(is_second ? second_rows : first_rows);
  }
  shape_tiles(shapes);
}

// The rows and panels of one call below; strides in bytes and in elements.
struct TileOperands {
  const bfloat16* x;
  int64_t x_bytes;  // from row to row
  const bfloat16* w;
  int64_t panel_size;
};

// Prefetches a tile of weights `ahead` bytes further on; 0: does nothing, since it is cached.
template <bool kFetches>
inline void fetch(const bfloat16* w, int64_t ahead) {
  if constexpr (kFetches) {
    const char* from = reinterpret_cast<const char*>(w) + ahead;
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) __builtin_prefetch(from + line * 64);
  }
}

// Prefetches 16 rows of inputs two tiles further on, from the L2 cache: a block of rows does not fit into L1,
// and their stride is too large for hardware prefetching.
inline void fetch_inputs(const char* x, int64_t x_bytes) {
#pragma GCC unroll 16
  for (int row = 0; row < kTileHeight; ++row) __builtin_prefetch(x + kInputsAhead + row * x_bytes);
}

// sums[16, 4 panels] += x times four panels for `steps` times 32 inputs. Sums are in tiles 0 to 3.
struct AddWide {
  static constexpr int64_t kPanels = 4;
  template <bool kFetches>
  static void run(const TileOperands& o, int64_t steps, int64_t ahead) {
    const bfloat16* w = o.w;
    for (int64_t step = 0; step < steps; ++step, w += kTileInputs * kPanel) {
      _tile_loadd(4, o.x + step * kTileInputs, o.x_bytes);
      fetch<kFetches>(w, ahead);
      _tile_loadd(5, w, 64);
      _tile_dpbf16ps(0, 4, 5);
      fetch<kFetches>(w + o.panel_size, ahead);
      _tile_loadd(6, w + o.panel_size, 64);
      _tile_dpbf16ps(1, 4, 6);
      fetch<kFetches>(w + 2 * o.panel_size, ahead);
      _tile_loadd(7, w + 2 * o.panel_size, 64);
      _tile_dpbf16ps(2, 4, 7);
      fetch<kFetches>(w + 3 * o.panel_size, ahead);
      _tile_loadd(5, w + 3 * o.panel_size, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
};

// The same with one panel, in tile 0.
struct AddNarrow {
  static constexpr int64_t kPanels = 1;
  template <bool kFetches>
  static void run(const TileOperands& o, int64_t steps, int64_t ahead) {
    const bfloat16* w = o.w;
    for (int64_t step = 0; step < steps; ++step, w += kTileInputs * kPanel) {
      fetch<kFetches>(w, ahead);
      _tile_loadd(4, o.x + step * kTileInputs, o.x_bytes);
      _tile_loadd(5, w, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
  }
};

// The same with two tiles of rows and two panels: tiles 0 and 1 are sums of the first rows.
struct AddSquare {
  static constexpr int64_t kPanels = 2;
  template <bool kFetches>
  static void run(const TileOperands& o, int64_t steps, int64_t ahead) {
    const bfloat16* w = o.w;
    const char* first = reinterpret_cast<const char*>(o.x);
    const char* second = first + kTileHeight * o.x_bytes;
    for (int64_t step = 0; step < steps; ++step, w += kTileInputs * kPanel) {
      fetch<kFetches>(w, ahead);
      fetch<kFetches>(w + o.panel_size, ahead);
      fetch_inputs(first + step * kTileRowBytes, o.x_bytes);
      fetch_inputs(second + step * kTileRowBytes, o.x_bytes);
      _tile_loadd(4, first + step * kTileRowBytes, o.x_bytes);
      _tile_loadd(6, w, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + o.panel_size, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, second + step * kTileRowBytes, o.x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};

// The last inputs, fewer than 32, of up to 32 rows and 4 panels, padded with zeros.
struct TileRest {
  alignas(64) bfloat16 x[2 * kTileHeight * kTileInputs];
  alignas(64) bfloat16 w[kTilePanels * kTileInputs * kPanel];

  TileRest(const TileOperands& o, int64_t rows, int64_t panels, int64_t begin, int64_t end) {
    const int64_t w_end = (end + 1) / 2 * 2;  // panels have complete pairs
    __builtin_memset(x, 0, sizeof x);
    __builtin_memset(w, 0, sizeof w);
    for (int64_t r = 0; r < rows; ++r) {
      const char* row = reinterpret_cast<const char*>(o.x) + r * o.x_bytes;
      __builtin_memcpy(x + r * kTileInputs, row + begin * sizeof(bfloat16), (end - begin) * sizeof(bfloat16));
    }
    for (int64_t p = 0; p < panels; ++p) {
      __builtin_memcpy(w + p * kTileInputs * kPanel, o.w + p * o.panel_size + begin * kPanel,
                       (w_end - begin) * kPanel * sizeof(bfloat16));
    }
    finish_writes(this);
  }

  TileOperands operands() const { return {x, 64, w, kTileInputs * kPanel}; }
};

// All inputs of `rows` rows by as many panels as Add takes, into zeroed sums.
template <class Add>
inline void add_all(const TileOperands& o, int64_t rows, int64_t inputs, bool fetches) {
  const int64_t steps = inputs / kTileInputs;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (fetches) {
    const int64_t last = std::min(steps, kTileAhead / kTileBytes), first = steps - last,
                  done = first * kTileInputs;
    Add::template run<true>(o, first, kTileAhead);
    // A panel is followed by the next one of this group in memory, so only the last panel prefetches beyond its
    // end.
    const int64_t others = (Add::kPanels - 1) * o.panel_size * static_cast<int64_t>(sizeof(bfloat16));
    Add::template run<true>({o.x + done, o.x_bytes, o.w + done * kPanel, o.panel_size}, last,
                            kTileAhead + others);
  } else {
    Add::template run<false>(o, steps, 0);
  }
  if (steps * kTileInputs < inputs) {
    const TileRest rest(o, rows, Add::kPanels, steps * kTileInputs, inputs);
    Add::template run<false>(rest.operands(), 1, 0);
  }
}

constexpr int64_t kSumsBytes = kTileColumns * sizeof(float);

// sums[rows <= 16, panels <= 4 of 16] = x times panels.
inline void multiply_one_tile(const TileOperands& o, int64_t rows, int64_t panels, int64_t inputs, float* sums,
                              bool fetches) {
  shape_tiles_for(rows, 0);
  if (panels == kTilePanels) {
    add_all<AddWide>(o, rows, inputs, fetches);
    _tile_stored(0, sums, kSumsBytes);
    _tile_stored(1, sums + kPanel, kSumsBytes);
    _tile_stored(2, sums + 2 * kPanel, kSumsBytes);
    _tile_stored(3, sums + 3 * kPanel, kSumsBytes);
    return;
  }
  for (int64_t p = 0; p < panels; ++p) {
    add_all<AddNarrow>({o.x, o.x_bytes, o.w + p * o.panel_size, o.panel_size}, rows, inputs, fetches);
    _tile_stored(0, sums + p * kPanel, kSumsBytes);
  }
}

// sums[16 < rows <= 32, panels <= 4 of 16] = x times panels.
inline void multiply_two_tiles(const TileOperands& o, int64_t rows, int64_t panels, int64_t inputs, float* sums,
                               bool fetches) {
  const int64_t second_rows = rows - kTileHeight;
  float* second = sums + kTileHeight * kTileColumns;
  shape_tiles_for(kTileHeight, second_rows);
  int64_t p = 0;
  for (; p + 2 <= panels; p += 2) {
    add_all<AddSquare>({o.x, o.x_bytes, o.w + p * o.panel_size, o.panel_size}, rows, inputs, fetches);
    _tile_stored(0, sums + p * kPanel, kSumsBytes);
    _tile_stored(1, sums + (p + 1) * kPanel, kSumsBytes);
    _tile_stored(2, second + p * kPanel, kSumsBytes);
    _tile_stored(3, second + (p + 1) * kPanel, kSumsBytes);
  }
  if (p == panels) return;
  // the last panel of an odd number: one tile of rows after the other
  const bfloat16* x = o.x + kTileHeight * o.x_bytes / static_cast<int64_t>(sizeof(bfloat16));
  const bfloat16* w = o.w + p * o.panel_size;
  multiply_one_tile({o.x, o.x_bytes, w, o.panel_size}, kTileHeight, 1, inputs, sums + p * kPanel, fetches);
  multiply_one_tile({x, o.x_bytes, w, o.panel_size}, second_rows, 1, inputs, second + p * kPanel, false);
}

// Rows [row, row + rows) by at most kTilePanels panels from `panel` on; if gated, also by the corresponding
// panels of the second half.
class TileTask {
 public:
  TileTask(const LinearArgs& args, int64_t row, int64_t rows, int64_t panel, int64_t panels)
      : a_(args), row_(row), rows_(rows), panel_(panel), panels_(panels) {}

  void run() {
    const Tiles tiles;
    for (int64_t begin = 0; begin < rows_; begin += kTileBlock) {
      const int64_t rows = std::min(kTileBlock, rows_ - begin);
      multiply(begin, rows, 0, sums_);
      if (a_.is_gated) multiply(begin, rows, a_.out_features / 2 / kPanel, ups_);
      write(begin, rows);
    }
  }

 private:
  // Rows of the task by its panels, or by those `further` panels behind them.
  void multiply(int64_t begin, int64_t rows, int64_t further, float* sums) {
    const int64_t panel_size = (a_.in_features + 1) / 2 * 2 * kPanel;
    const TileOperands operands{static_cast<const bfloat16*>(a_.x) + (row_ + begin) * a_.x_stride,
                                a_.x_stride * static_cast<int64_t>(sizeof(bfloat16)),
                                static_cast<const bfloat16*>(a_.packed) + (panel_ + further) * panel_size,
                                panel_size};
    const auto block = rows > kTileHeight ? multiply_two_tiles : multiply_one_tile;
    // the first rows prefetch the weights into the cache for the others
    block(operands, rows, panels_, a_.in_features, sums, begin == 0);
  }

  void write(int64_t begin, int64_t rows) const {
    const int64_t column = panel_ * kPanel;
    const int64_t columns =
        std::min(panels_ * kPanel, (a_.is_gated ? a_.out_features / 2 : a_.out_features) - column);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * kTileColumns, row = row_ + begin + r;
      if (!a_.is_gated) {
        write_row<bfloat16>(a_, sums_ + at, row, column, columns);
      } else {
        with_gate(a_.gate, [&](auto activation) {
          write_gated_row<bfloat16>(a_, activation, sums_ + at, ups_ + at, row, column, columns);
        });
      }
    }
  }

  const LinearArgs& a_;
  const int64_t row_, rows_, panel_, panels_;
  alignas(64) float sums_[kTileBlock * kTileColumns];
  alignas(64) float ups_[kTileBlock * kTileColumns];
};

inline void multiply_in_tiles(const LinearArgs& a) {
  if (a.rows == 0 || a.out_features == 0) return;
  const int64_t panels = a.is_gated ? a.out_features / 2 / kPanel : (a.out_features + kPanel - 1) / kPanel;
  const int64_t blocks = (a.rows + kTileBlock - 1) / kTileBlock;
  const int64_t block_bytes = kTileBlock * a.in_features * static_cast<int64_t>(sizeof(bfloat16));
  const int64_t most_blocks = std::max<int64_t>(1, kInputBytesOfTask / std::max<int64_t>(1, block_bytes));
  const int64_t row_tasks = (blocks + most_blocks - 1) / most_blocks;
  const int threads = threads_for(a.rows * a.in_features * a.out_features / 8);
  // fewer panels per task if there would be too few tasks to balance the threads
  int64_t group = kTilePanels;
  while (group > 1 && row_tasks * ((panels + group - 1) / group) < 4 * threads) group /= 2;
  const int64_t groups = (panels + group - 1) / group;
  const auto task = [&](int64_t index) {
    const int64_t of_rows = index / groups, panel = index % groups * group;
    const int64_t row = blocks * of_rows / row_tasks * kTileBlock;
    const int64_t end = std::min(a.rows, blocks * (of_rows + 1) / row_tasks * kTileBlock);
    TileTask(a, row, end - row, panel, std::min(group, panels - panel)).run();
  };
  if (threads == 1) {
    for (int64_t i = 0; i < row_tasks * groups; ++i) task(i);
  } else {
    run_parts(row_tasks * groups, threads, [&](int64_t index, int64_t) { task(index); });
  }
}

}  // namespace
}  // namespace ascend_vllm

#endif
