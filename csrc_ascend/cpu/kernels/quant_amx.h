// Rows of bfloat16 by weights in codes with AMX tiles, see quant_widen.h: a slice of weights is widened once
// for all rows of a task.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/isa/tiles.h"

namespace ascend_vllm {
namespace {

// The inputs of a task's rows in a slice, the widened weights and the sums should stay in the L2 cache.
constexpr PieceSizes kTilePieces{.rows = 256, .panels = 16, .gated_rows = 256, .gated_panels = 8};
constexpr int64_t kSumsStride = kTilePieces.stride();

// Adds a tile of products to the sums of `rows` rows from `row` on.
inline void add_tile(const QuantizedWeight& weight, int64_t panel, const TileBlock& block, float* products,
                     int64_t rows, FloatRows sums, int64_t row) {
  add_scaled(weight, panel, block.group, block.step == 0, {products, kPanel}, rows,
             {sums.first + row * sums.stride, sums.stride});
}

// sums[rows][kPanels of 16] = at most 16 rows by four panels, or 32 by two; a step is widened while the one
// before it is multiplied.
template <Code kCode, bool kTwo>
__attribute__((noinline)) void multiply_few(const QuantizedWeight& weight, const bfloat16* x, int64_t x_bytes,
                                            int64_t rows, int64_t panel, float* sums) {
  constexpr int kPanels = kTwo ? 2 : 4;
  constexpr int64_t kSize = kTileHeight * kPanel;
  using Widener = StepWidener<kCode, kPanels>;
  alignas(64) typename Widener::Step widened[2];
  alignas(64) float products[4 * kSize];
  const int64_t height = std::min(rows, kTileHeight);
  const bfloat16* second = x + kTileHeight * x_bytes / static_cast<int64_t>(sizeof(bfloat16));
  Widener widener(weight, panel, first_block(weight));
  widener.widen(widened[0]);
  for_tile_blocks(weight, [&](const TileBlock& block) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t end = block.step + block.steps();
    for (int64_t step = block.step; step < end; ++step) {
      if (!widener.is_done()) widener.widen(widened[(step + 1) % 2]);
      finish_writes(widened);
      const auto& w = widened[step % 2];
      _tile_loadd(4, x + step * kStepInputs, x_bytes);
      if constexpr (kTwo) {
        _tile_loadd(5, second + step * kStepInputs, x_bytes);
        _tile_loadd(6, w[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, w[1], 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      } else {
        _tile_loadd(5, w[0], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w[1], 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w[2], 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w[3], 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, products, 64);
    _tile_stored(1, products + kSize, 64);
    _tile_stored(2, products + 2 * kSize, 64);
    _tile_stored(3, products + 3 * kSize, 64);
    finish_writes(products);
    for (int p = 0; p < kPanels; ++p) {
      const FloatRows to{sums + p * kPanel, kSumsStride};
      add_tile(weight, panel + p, block, products + p * kSize, height, to, 0);
      if constexpr (kTwo) {
        add_tile(weight, panel + p, block, products + (2 + p) * kSize, rows - height, to, kTileHeight);
      }
    }
  });
}

// products[2][kPanels][16 rows][16] = two tiles of rows, or one, by one or two panels, for some steps;
// before_step(index) comes before each.
template <bool kTwo, int kPanels, class BeforeStep>
inline void multiply_square(const bfloat16* x, int64_t x_bytes, const bfloat16 (*w)[kPanels][kStepSize],
                            int64_t steps, const BeforeStep& before_step, float* products) {
  const char* first = reinterpret_cast<const char*>(x);
  const char* second = first + kTileHeight * x_bytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, first += kTileRowBytes, second += kTileRowBytes) {
    before_step(step);
    _tile_stream_loadd(4, first, x_bytes);
    _tile_loadd(6, w[step][0], 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kPanels == 2) {
      _tile_loadd(7, w[step][1], 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwo) {
      _tile_stream_loadd(5, second, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kPanels == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int64_t kSize = kTileHeight * kPanel;
  _tile_stored(0, products, 64);
  if constexpr (kPanels == 2) _tile_stored(1, products + kSize, 64);
  if constexpr (kTwo) _tile_stored(2, products + kPanels * kSize, 64);
  if constexpr (kTwo && kPanels == 2) _tile_stored(3, products + 3 * kSize, 64);
  finish_writes(products);
}

// sums[rows][kPanels of 16] (+)= rows by panels, for the inputs of a slice. Its weights are widened while the
// first rows are multiplied by those before them.
template <Code kCode, int kPanels>
__attribute__((noinline)) void multiply_slice(const QuantizedWeight& weight, const TileSlice& slice,
                                              const bfloat16* x, int64_t x_bytes, int64_t rows, int64_t panel,
                                              float* sums) {
  using Widener = StepWidener<kCode, kPanels>;
  constexpr int64_t kSize = kTileHeight * kPanel;
  alignas(64) typename Widener::Step widened[kBlockSteps];
  alignas(64) float products[2 * kPanels * kSize];
  Widener widener(weight, panel, slice.blocks[0]);
  widener.widen(widened[0]);
  for (int64_t row = 0; row < rows; row += 2 * kTileHeight) {
    const int64_t first = std::min(kTileHeight, rows - row), second = std::min(kTileHeight, rows - row - first);
    if (row == 0 || row + 2 * kTileHeight > rows) shape_tiles_for(first, second);
    const bfloat16* own = x + row * x_bytes / static_cast<int64_t>(sizeof(bfloat16));
    for (int64_t b = 0; b < slice.count; ++b) {
      const TileBlock& block = slice.blocks[b];
      const int64_t begin = block.step - slice.blocks[0].step;
      const auto multiply = [&](const auto& before_step) {
        const auto run = second > 0 ? multiply_square<true, kPanels, decltype(before_step)>
                                    : multiply_square<false, kPanels, decltype(before_step)>;
        run(own + block.step * kStepInputs, x_bytes, widened + begin, block.steps(), before_step, products);
      };
      if (row == 0) {
        multiply([&](int64_t step) {
          if (begin + step + 1 < slice.steps) widener.widen(widened[begin + step + 1]);
          finish_writes(widened);
        });
      } else {
        multiply([](int64_t) {});
      }
      for (int p = 0; p < kPanels; ++p) {
        const FloatRows to{sums + p * kPanel, kSumsStride};
        add_tile(weight, panel + p, block, products + p * kSize, first, to, row);
        add_tile(weight, panel + p, block, products + (kPanels + p) * kSize, second, to, row + kTileHeight);
      }
    }
  }
}

template <Code kCode>
inline void multiply_in_tiles(const QuantizedWeight& weight, const bfloat16* x, int64_t x_stride, int64_t rows,
                              int64_t panel, int64_t panels, float* sums) {
  const Tiles tiles;
  const int64_t x_bytes = x_stride * static_cast<int64_t>(sizeof(bfloat16));
  int64_t begin = 0;
  if (rows <= 2 * kTileHeight) {
    const bool are_two = rows > kTileHeight;
    const int64_t together = are_two ? 2 : 4;
    shape_tiles_for(are_two ? kTileHeight : rows, are_two ? rows - kTileHeight : 0);
    const auto few = are_two ? multiply_few<kCode, true> : multiply_few<kCode, false>;
    for (; begin + together <= panels; begin += together) {
      few(weight, x, x_bytes, rows, panel + begin, sums + begin * kPanel);
    }
    if (begin == panels) return;
  }
  for (TileSlice slice = slice_after(weight, {}); slice.count > 0; slice = slice_after(weight, slice)) {
    int64_t p = begin;
    for (; p + 2 <= panels; p += 2) {
      multiply_slice<kCode, 2>(weight, slice, x, x_bytes, rows, panel + p, sums + p * kPanel);
    }
    if (p < panels) multiply_slice<kCode, 1>(weight, slice, x, x_bytes, rows, panel + p, sums + p * kPanel);
  }
}

// sums[rows][kSumsStride] = rows of steps of bfloat16 by panels.
inline void multiply_widened(const QuantizedWeight& weight, const bfloat16* x, int64_t x_stride, int64_t rows,
                             int64_t panel, int64_t panels, float* sums) {
  with_code(weight.code,
            [&]<Code kCode>() { multiply_in_tiles<kCode>(weight, x, x_stride, rows, panel, panels, sums); });
}

}  // namespace
}  // namespace ascend_vllm

#endif
