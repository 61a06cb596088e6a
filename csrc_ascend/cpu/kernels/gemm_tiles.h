// The bfloat16 products of gemm.h in tiles (AMX): 16 rows of 32 inputs times 16 pairs of inputs by 16 outputs, which
// is how a panel lies in memory anyway.
//
// Every output is one chain of tile products in the order of the inputs, whatever the number of rows and threads, so
// that a row's result does not depend on the rows beside it. Subnormal numbers count as zero, as the hardware
// defines it.
#pragma once

#ifdef __AMX_BF16__

namespace ascend_vllm {
namespace {

constexpr int64_t kTileInputs = 32;  // inputs of a tile
constexpr int64_t kTileHeight = 16;  // rows of a tile
constexpr int64_t kTilePanels = 4;   // most panels of a task
constexpr int64_t kTileColumns = kTilePanels * kPanel;
// Inputs of a task's rows should stay in the second cache while all panels pass by.
constexpr int64_t kInputBytesOfTask = 1 << 20;
// What is fetched ahead of each panel, in bytes.
constexpr int64_t kTileAhead = 4096;

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums. With two tiles of rows 4 and 5 are inputs, 6 and 7 weights; with one, 4 is inputs and 5 to
// 7 are weights.
inline void shape_tiles(int64_t first_rows, int64_t second_rows) {
  TileShapes shapes;
  const bool has_second = second_rows > 0;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_second = has_second && (tile == 2 || tile == 3 || tile == 5);
    const bool is_weights = tile >= (has_second ? 6 : 5);
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = static_cast<uint8_t>(is_weights ? kTileHeight : is_second ? second_rows : first_rows);
  }
  _tile_loadconfig(&shapes);
}

// The rows and panels of one call below; strides in bytes and in elements.
struct TileOperands {
  const bfloat16* x;
  int64_t x_bytes;  // from row to row
  const bfloat16* w;
  int64_t panel_size;
};

template <bool kFetches>
inline void fetch_ahead(const bfloat16* w) {
  if constexpr (kFetches) {
    const char* ahead = reinterpret_cast<const char*>(w) + kTileAhead;
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) __builtin_prefetch(ahead + line * 64);
  }
}

// sums[16, 4 panels] += x times four panels for `steps` times 32 inputs. Sums are in tiles 0 to 3.
template <bool kFetches>
inline void add_wide(const TileOperands& o, int64_t steps) {
  const bfloat16* w = o.w;
  for (int64_t step = 0; step < steps; ++step, w += kTileInputs * kPanel) {
    _tile_loadd(4, o.x + step * kTileInputs, o.x_bytes);
    fetch_ahead<kFetches>(w);
    _tile_loadd(5, w, 64);
    _tile_dpbf16ps(0, 4, 5);
    fetch_ahead<kFetches>(w + o.panel_size);
    _tile_loadd(6, w + o.panel_size, 64);
    _tile_dpbf16ps(1, 4, 6);
    fetch_ahead<kFetches>(w + 2 * o.panel_size);
    _tile_loadd(7, w + 2 * o.panel_size, 64);
    _tile_dpbf16ps(2, 4, 7);
    fetch_ahead<kFetches>(w + 3 * o.panel_size);
    _tile_loadd(5, w + 3 * o.panel_size, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
}

// The same with one panel, in tile 0.
template <bool kFetches>
inline void add_narrow(const TileOperands& o, int64_t steps) {
  const bfloat16* w = o.w;
  for (int64_t step = 0; step < steps; ++step, w += kTileInputs * kPanel) {
    fetch_ahead<kFetches>(w);
    _tile_loadd(4, o.x + step * kTileInputs, o.x_bytes);
    _tile_loadd(5, w, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
}

// The same with two tiles of rows and two panels: tiles 0 and 1 are sums of the first rows.
template <bool kFetches>
inline void add_square(const TileOperands& o, int64_t steps) {
  const bfloat16* w = o.w;
  const char* second = reinterpret_cast<const char*>(o.x) + kTileHeight * o.x_bytes;
  for (int64_t step = 0; step < steps; ++step, w += kTileInputs * kPanel) {
    fetch_ahead<kFetches>(w);
    fetch_ahead<kFetches>(w + o.panel_size);
    _tile_loadd(4, o.x + step * kTileInputs, o.x_bytes);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + o.panel_size, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, second + step * 64, o.x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The last inputs, fewer than 32, of up to 32 rows and 4 panels, filled up with zeros.
struct TileRest {
  alignas(64) bfloat16 x[2 * kTileHeight * kTileInputs];
  alignas(64) bfloat16 w[kTilePanels * kTileInputs * kPanel];

  TileRest(const TileOperands& o, int64_t rows, int64_t panels, int64_t begin, int64_t x_end, int64_t w_end) {
    __builtin_memset(x, 0, sizeof x);
    __builtin_memset(w, 0, sizeof w);
    for (int64_t r = 0; r < rows; ++r) {
      const char* row = reinterpret_cast<const char*>(o.x) + r * o.x_bytes;
      __builtin_memcpy(x + r * kTileInputs, row + begin * sizeof(bfloat16), (x_end - begin) * sizeof(bfloat16));
    }
    for (int64_t p = 0; p < panels; ++p) {
      __builtin_memcpy(w + p * kTileInputs * kPanel, o.w + p * o.panel_size + begin * kPanel,
                       (w_end - begin) * kPanel * sizeof(bfloat16));
    }
  }

  TileOperands operands() const { return {x, 64, w, kTileInputs * kPanel}; }
};

// sums[rows <= 32, panels <= 4 of 16] = x times panels.
template <bool kFetches>
void multiply_block(const TileOperands& o, int64_t rows, int64_t panels, int64_t inputs, float* sums) {
  constexpr int64_t kStride = kTileColumns * sizeof(float);
  const int64_t steps = inputs / kTileInputs, whole = steps * kTileInputs, padded = (inputs + 1) / 2 * 2;
  const bool has_rest = whole < inputs;
  const int64_t second_rows = rows > kTileHeight ? rows - kTileHeight : 0;
  shape_tiles(second_rows > 0 ? kTileHeight : rows, second_rows);
  // adds(operands, steps) with sums of `width` panels from `panel` on
  const auto part = [&](int64_t panel, int64_t width, auto add) __attribute__((always_inline)) {
    const TileOperands from{o.x, o.x_bytes, o.w + panel * o.panel_size, o.panel_size};
    add(from, steps);
    if (has_rest) {
      const TileRest rest(from, rows, width, whole, inputs, padded);
      add(rest.operands(), int64_t{1});
    }
  };
  const auto clear = [] {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  };
  int64_t panel = 0;
  if (second_rows > 0) {
    float* second = sums + kTileHeight * kTileColumns;
    for (; panel + 2 <= panels; panel += 2) {
      clear();
      part(panel, 2, [](const TileOperands& from, int64_t count) { add_square<kFetches>(from, count); });
      _tile_stored(0, sums + panel * kPanel, kStride);
      _tile_stored(1, sums + (panel + 1) * kPanel, kStride);
      _tile_stored(2, second + panel * kPanel, kStride);
      _tile_stored(3, second + (panel + 1) * kPanel, kStride);
    }
    if (panel == panels) return;
    // an odd panel: the rows one tile after the other
    multiply_block<kFetches>({o.x, o.x_bytes, o.w + panel * o.panel_size, o.panel_size}, kTileHeight, 1, inputs,
                             sums + panel * kPanel);
    const bfloat16* x = o.x + kTileHeight * o.x_bytes / static_cast<int64_t>(sizeof(bfloat16));
    multiply_block<false>({x, o.x_bytes, o.w + panel * o.panel_size, o.panel_size}, second_rows, 1, inputs,
                          second + panel * kPanel);
    return;
  }
  for (; panel + 4 <= panels; panel += 4) {
    clear();
    part(panel, 4, [](const TileOperands& from, int64_t count) { add_wide<kFetches>(from, count); });
    _tile_stored(0, sums + panel * kPanel, kStride);
    _tile_stored(1, sums + (panel + 1) * kPanel, kStride);
    _tile_stored(2, sums + (panel + 2) * kPanel, kStride);
    _tile_stored(3, sums + (panel + 3) * kPanel, kStride);
  }
  for (; panel < panels; ++panel) {
    clear();
    part(panel, 1, [](const TileOperands& from, int64_t count) { add_narrow<kFetches>(from, count); });
    _tile_stored(0, sums + panel * kPanel, kStride);
  }
}

// Rows [row, row + rows) by panels [panel, panel + panels), as run_task in gemm.h.
inline void run_tile_task(const LinearArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
  constexpr int64_t kBlock = 2 * kTileHeight;
  alignas(64) float sums[kBlock * kTileColumns], ups[kBlock * kTileColumns];
  const int64_t panel_size = (a.in_features + 1) / 2 * 2 * kPanel, column = panel * kPanel;
  const bfloat16* w = static_cast<const bfloat16*>(a.packed) + panel * panel_size;
  const bfloat16* ups_w = w + a.out_features / 2 / kPanel * panel_size;
  const int64_t columns = std::min(panels * kPanel, (a.is_gated ? a.out_features / 2 : a.out_features) - column);
  for (int64_t begin = 0; begin < rows; begin += kBlock) {
    const int64_t count = std::min(kBlock, rows - begin);
    const bfloat16* x = static_cast<const bfloat16*>(a.x) + (row + begin) * a.x_stride;
    const int64_t x_bytes = a.x_stride * static_cast<int64_t>(sizeof(bfloat16));
    // the first rows fetch the weights, the others find them in the cache
    const auto multiply = begin == 0 ? multiply_block<true> : multiply_block<false>;
    multiply({x, x_bytes, w, panel_size}, count, panels, a.in_features, sums);
    if (a.is_gated) multiply({x, x_bytes, ups_w, panel_size}, count, panels, a.in_features, ups);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = r * kTileColumns;
      if (!a.is_gated) {
        write_row<bfloat16>(a, sums + at, row + begin + r, column, columns);
      } else {
        with_gate(a.gate, [&](auto activation) {
          write_gated_row<bfloat16>(a, activation, sums + at, ups + at, row + begin + r, column, columns);
        });
      }
    }
  }
  _tile_release();
}

inline void multiply_in_tiles(const LinearArgs& a) {
  if (a.rows == 0 || a.out_features == 0) return;
  constexpr int64_t kBlock = 2 * kTileHeight;
  const int64_t panels = a.is_gated ? a.out_features / 2 / kPanel : (a.out_features + kPanel - 1) / kPanel;
  const int64_t blocks = (a.rows + kBlock - 1) / kBlock;
  const int64_t most_blocks =
      std::max<int64_t>(1, kInputBytesOfTask / (kBlock * a.in_features * int64_t{sizeof(bfloat16)} + 1));
  const int64_t row_tasks = (blocks + most_blocks - 1) / most_blocks;
  const int threads = threads_for(a.rows * a.in_features * a.out_features / 8);
  // Fewer panels in a task when there are too few tasks to keep every thread busy to the end.
  int64_t group = kTilePanels;
  while (group > 1 && row_tasks * ((panels + group - 1) / group) < 4 * threads) group /= 2;
  const int64_t groups = (panels + group - 1) / group;
  const auto task = [&](int64_t index) {
    const int64_t of_rows = index / groups, panel = index % groups * group;
    const int64_t row = blocks * of_rows / row_tasks * kBlock;
    const int64_t end = std::min(a.rows, blocks * (of_rows + 1) / row_tasks * kBlock);
    run_tile_task(a, row, end - row, panel, std::min(group, panels - panel));
  };
  if (threads == 1) {
    for (int64_t i = 0; i < row_tasks * groups; ++i) task(i);
  } else {
    share(row_tasks * groups, threads, [&](int64_t index, int64_t) { task(index); });
  }
}

}  // namespace
}  // namespace ascend_vllm

#endif
