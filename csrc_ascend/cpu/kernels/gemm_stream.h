// The bfloat16 products of gemm_tiles.h for up to 16 rows, whose weights come from memory: one panel is read
// after the other, as one stream, since that is what the processor's own prefetching is made for.
//
// Measured with two threads of an Intel Xeon (Granite Rapids kind), 60 experts of 1,024 by 208, 32 tokens with
// four experts each, as a share of the time that the same threads need to only read the weights of the chosen
// experts: four panels at a time 73%, one at a time 91%, with the prefetching below 94%.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/kernels/gemm_tasks.h"

namespace ascend_vllm {
namespace {

// Prefetch distance in bytes: one tile of weights. With 4,096 or more the share above is 91%.
constexpr int64_t kStreamAhead = 1024;

// Rows [row, row + rows), at most 16, by at most kStreamPanels panels from `panel` on; if gated, also by the
// corresponding panels of the second half. Inputs behind an odd number of them must be zero.
class StreamTask {
 public:
  StreamTask(const LinearArgs& args, int64_t row, int64_t rows, int64_t panel, int64_t panels)
      : a_(args),
        row_(row),
        rows_(rows),
        panel_(panel),
        panels_(panels),
        padded_((args.in_features + 1) / 2 * 2) {}

  void run() {
    const Tiles tiles(shapes());
    multiply(panel_, sums_);
    if (a_.is_gated) multiply(panel_ + a_.out_features / 2 / kPanel, ups_);
    finish_writes(this);
    const int64_t column = panel_ * kPanel;
    const int64_t columns =
        std::min(panels_ * kPanel, (a_.is_gated ? a_.out_features / 2 : a_.out_features) - column);
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t at = r * kRowSums;
      if (!a_.is_gated) {
        write_row<bfloat16>(a_, sums_ + at, row_ + r, column, columns);
      } else {
        with_gate<bfloat16>(a_.gate, [&](auto activation) {
          write_gated_row<bfloat16>(a_, activation, sums_ + at, ups_ + at, row_ + r, column, columns);
        });
      }
    }
  }

 private:
  static constexpr int64_t kRowSums = kStreamPanels * kPanel;

  // Tile 0 is sums, 1 and 2 are inputs and weights; 3 and 4 are the last ones, if they are fewer than 32.
  TileShapes shapes() const {
    const int64_t rest = padded_ % kTileInputs;
    TileShapes shapes;
    shapes.rows[0] = shapes.rows[1] = static_cast<uint8_t>(rows_);
    if (rest > 0) {
      shapes.rows[3] = static_cast<uint8_t>(rows_);
      shapes.row_bytes[3] = static_cast<uint16_t>(rest * sizeof(bfloat16));
      shapes.rows[4] = static_cast<uint8_t>(rest / 2);
    }
    return shapes;
  }

  // sums[rows, panels] = x times the panels from `panel` on.
  void multiply(int64_t panel, float* sums) const {
    constexpr int64_t kElements = kTileInputs * kPanel;
    const int64_t steps = padded_ / kTileInputs,
                  row_bytes = a_.x_stride * static_cast<int64_t>(sizeof(bfloat16));
    const bfloat16* x = static_cast<const bfloat16*>(a_.x) + row_ * a_.x_stride;
    const bfloat16* w = static_cast<const bfloat16*>(a_.packed) + panel * padded_ * kPanel;
    for (int64_t p = 0; p < panels_; ++p, w += padded_ % kTileInputs * kPanel) {
      _tile_zero(0);
      for (int64_t step = 0; step < steps; ++step, w += kElements) {
        const char* ahead = reinterpret_cast<const char*>(w) + kStreamAhead;
#pragma GCC unroll 16
        for (int line = 0; line < kTileHeight; ++line) __builtin_prefetch(ahead + line * kTileRowBytes);
        _tile_loadd(1, x + step * kTileInputs, row_bytes);
        _tile_loadd(2, w, kTileRowBytes);
        _tile_dpbf16ps(0, 1, 2);
      }
      if (padded_ > steps * kTileInputs) {
        _tile_loadd(3, x + steps * kTileInputs, row_bytes);
        _tile_loadd(4, w, kTileRowBytes);
        _tile_dpbf16ps(0, 3, 4);
      }
      _tile_stored(0, sums + p * kPanel, kRowSums * sizeof(float));
    }
  }

  const LinearArgs& a_;
  const int64_t row_, rows_, panel_, panels_, padded_;
  alignas(64) float sums_[kTileHeight * kRowSums];
  alignas(64) float ups_[kTileHeight * kRowSums];
};

}  // namespace
}  // namespace ascend_vllm

#endif
