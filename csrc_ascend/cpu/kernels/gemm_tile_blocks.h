// What gemm_tiles.h multiplies, and where the results go: blocks of 32 rows, pairs of panels, sums of a block.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/isa/tiles.h"

namespace ascend_vllm {
namespace {

constexpr int64_t kTileInputs = 32;  // inputs of a tile
constexpr int64_t kTileElements = kTileInputs * kPanel;
constexpr int64_t kTileBytes = kTileHeight * kTileRowBytes;
constexpr int64_t kTileBlock = 2 * kTileHeight;  // rows of a block
constexpr int64_t kBlockBytes = 2 * kTileBytes;  // of a block's inputs in tiles
// Sums of a block are float32 [32, 32].
constexpr int64_t kSumsRow = 2 * kPanel, kSumsRowBytes = kSumsRow * sizeof(float);
constexpr int64_t kBlockSums = kTileBlock * kSumsRow;
// Results of at least so many bytes are written past the caches, which they would leave before they are read:
// those of many rows only if they are at least so wide, since otherwise lines of the L2 cache were measured
// faster.
constexpr int64_t kStreamedBytes = 1 << 20, kLeastStreamedWidth = 8192;

// Inputs of up to 32 rows in two tiles, or of up to 16 in one.
struct InputTiles {
  const char* first;
  const char* second;
  int64_t row_bytes;   // from row to row
  int64_t step_bytes;  // from tile to tile

  InputTiles from(int64_t step) const {
    return {first + step * step_bytes, second + step * step_bytes, row_bytes, step_bytes};
  }
};

// Two panels, or one twice.
struct PanelPair {
  const bfloat16* first;
  const bfloat16* second;

  PanelPair from(int64_t step) const { return {first + step * kTileElements, second + step * kTileElements}; }
};

// Rows [row, row + count) of x in blocks. All tiles are full if there are 16 rows: the last block overlaps with
// the one before, and if it is the only one, its second tile with the first.
class TaskRows {
 public:
  TaskRows(const LinearArgs& args, int64_t row, int64_t count)
      : row_(row),
        count_(count),
        blocks_((count + kTileBlock - 1) / kTileBlock),
        row_bytes_(args.x_stride * static_cast<int64_t>(sizeof(bfloat16))),
        inputs_(args.in_features),
        x_(static_cast<const char*>(args.x)),
        x_rows_(args.x_rows) {}

  int64_t row() const { return row_; }
  int64_t count() const { return count_; }
  int64_t blocks() const { return blocks_; }

  // The rows of x at which the tiles of a block begin.
  int64_t first_row(int64_t block) const {
    return row_ + std::max<int64_t>(0, std::min(block * kTileBlock, count_ - kTileBlock));
  }
  int64_t second_row(int64_t block) const {
    return std::min(first_row(block) + kTileHeight, row_ + std::max<int64_t>(0, count_ - kTileHeight));
  }

  // Where x has a row.
  const char* at(int64_t row) const { return x_ + (x_rows_ == nullptr ? row : x_rows_[row]) * row_bytes_; }

  // A block where x has it, if it has the rows in order.
  InputTiles direct(int64_t block) const {
    return {x_ + first_row(block) * row_bytes_, x_ + second_row(block) * row_bytes_, row_bytes_, kTileRowBytes};
  }

  // A block where pack() has written it.
  static InputTiles packed(const char* copy) { return {copy, copy + kTileBytes, kTileRowBytes, kBlockBytes}; }

  // Of copies of `steps` tiles of all blocks.
  int64_t packed_bytes(int64_t steps) const { return blocks_ * steps * kBlockBytes; }

  // Copies the tiles [begin, end) of a block's inputs, the last one padded with zeros; there are at least 32
  // rows.
  void pack(int64_t block, int64_t begin, int64_t end, char* to) const {
    constexpr int64_t kTogether = 4;
    const int64_t first = first_row(block), whole = std::min(end, inputs_ / kTileInputs);
    for (int64_t step = begin; step < whole; step += kTogether) {
      const int64_t count = std::min(kTogether, whole - step);
      for (int64_t r = 0; r < kTileBlock; ++r) {
        const char* row = at(first + r) + step * kTileRowBytes;
        char* tile_row = to + (step - begin) * kBlockBytes + r * kTileRowBytes;
        for (int64_t i = 0; i < count; ++i) {
          _mm512_store_si512(tile_row + i * kBlockBytes, _mm512_loadu_si512(row + i * kTileRowBytes));
        }
      }
    }
    if (whole < end) {
      const __mmask32 used = (__mmask32{1} << inputs_ % kTileInputs) - 1;
      char* tile_row = to + (whole - begin) * kBlockBytes;
      for (int64_t r = 0; r < kTileBlock; ++r, tile_row += kTileRowBytes) {
        _mm512_store_si512(tile_row, _mm512_maskz_loadu_epi16(used, at(first + r) + whole * kTileRowBytes));
      }
    }
    finish_writes();
  }

 private:
  const int64_t row_, count_, blocks_, row_bytes_, inputs_;
  const char* const x_;
  const int32_t* const x_rows_;
};

// The weights of the last inputs, fewer than 32, of a pair of panels, padded with zeros.
class PanelRest {
 public:
  void copy(const PanelPair& w, int64_t inputs) {
    const int64_t bytes = (inputs + 1) / 2 * 2 * kPanel * sizeof(bfloat16);  // of complete pairs of inputs
    __builtin_memset(w_, 0, sizeof w_);
    __builtin_memcpy(w_[0], w.first, bytes);
    __builtin_memcpy(w_[1], w.second, bytes);
    finish_writes(w_);
  }

  PanelPair panels() const { return {w_[0], w_[1]}; }

 private:
  alignas(64) bfloat16 w_[2][kTileElements];
};

// The last inputs, fewer than 32, of a block, padded with zeros.
class TileRest {
 public:
  TileRest(const InputTiles& x, int64_t tile_rows, int64_t inputs) {
    __builtin_memset(x_, 0, sizeof x_);
    for (int64_t r = 0; r < tile_rows; ++r) {
      __builtin_memcpy(x_[0] + r * kTileInputs, x.first + r * x.row_bytes, inputs * sizeof(bfloat16));
      __builtin_memcpy(x_[1] + r * kTileInputs, x.second + r * x.row_bytes, inputs * sizeof(bfloat16));
    }
    finish_writes(x_);
  }

  InputTiles rows() const {
    return {reinterpret_cast<const char*>(x_[0]), reinterpret_cast<const char*>(x_[1]), kTileRowBytes, 0};
  }

 private:
  alignas(64) bfloat16 x_[2][kTileElements];
};

// Writes results of sums, some rows at a time, while the next block or the next pair of panels is multiplied.
class BlockWriter {
 public:
  BlockWriter(const LinearArgs& args, const TaskRows& rows)
      : a_(args),
        rows_(rows),
        all_columns_(args.is_gated ? args.out_features / 2 : args.out_features),
        streams_(args.rows * args.out_stride * static_cast<int64_t>(sizeof(bfloat16)) >= kStreamedBytes &&
                 (reinterpret_cast<uintptr_t>(args.out) | args.out_stride * sizeof(bfloat16)) % 64 == 0) {}

  // Memory for the sums of a block, whose results are the columns from `column` on, at most of `panels` panels;
  // `gates`: the sums of their gates.
  float* next(int64_t block, int64_t column, int64_t panels, const float* gates) {
    float* sums = sums_ == buffer_[0] ? buffer_[1] : buffer_[0];
    set(column, panels, sums, gates);
    row_ = block * kTileBlock;
    last_ = row_ + (rows_.count() > kTileHeight ? kTileBlock : rows_.count());
    at_ = 0;
    credit_ = -kPause * kRowsOfStep * kOne;
    rate_ = kRowsOfStep * kOne;
    return sums;
  }

  // The sums of all blocks, at least 32 rows, as next() takes those of one; they are not changed before the
  // next call. steps: of a block until then.
  void take(int64_t column, int64_t panels, int64_t steps, const float* sums, const float* gates) {
    set(column, panels, sums, gates);
    is_streamed_ = is_streamed_ && !a_.is_gated && a_.out_stride >= kLeastStreamedWidth;
    row_ = at_ = credit_ = 0;
    last_ = rows_.blocks() * kTileBlock;
    const bfloat16* out = static_cast<const bfloat16*>(a_.out) + rows_.row() * a_.out_stride + column;
    for (int64_t r = 0; r < kRowsAhead; ++r) _mm_prefetch(out + r * a_.out_stride, _MM_HINT_T1);
    if (steps > 0) rate_ = (kTileBlock * kOne + steps - 1) / steps;
  }

  // Writes some rows, but not at once after their sums were stored, which would wait for their products.
  [[gnu::always_inline]] void step() {
    for (credit_ += rate_; credit_ >= kOne && row_ < last_; credit_ -= kOne) write_next();
  }

  void finish_block() {
    while (row_ < last_) write_next();
  }

  void finish() {
    finish_block();
    if (streams_) _mm_sfence();
  }

 private:
  static constexpr int64_t kPause = 6, kRowsOfStep = 3;
  static constexpr int64_t kOne = 64;  // a row, in the unit of rates
  // How far the lines that rows are written to are prefetched: a store that misses the L2 cache, also one past
  // the caches, takes a fill buffer from the tiles' loads for as long as memory takes.
  static constexpr int64_t kRowsAhead = 24;

  void set(int64_t column, int64_t panels, const float* sums, const float* gates) {
    finish_block();
    sums_ = sums;
    gates_ = gates;
    column_ = column;
    columns_ = std::min(std::min<int64_t>(panels, 2) * kPanel, all_columns_ - column);
    is_streamed_ = streams_ && column % kSumsRow == 0;
  }

  void write_next() {
    const int64_t block = row_ / kTileBlock, r = row_ % kTileBlock, at = at_;
    const int64_t row =
        r < kTileHeight ? rows_.first_row(block) + r : rows_.second_row(block) + r - kTileHeight;
    ++row_;
    at_ += kSumsRow;
    if (a_.is_gated) {
      with_gate<bfloat16>(a_.gate, [&](auto activation) {
        if (columns_ < 2 * kPanel) {
          return write_gated_row<bfloat16>(a_, activation, gates_ + at, sums_ + at, row, column_, columns_);
        }
        const auto lanes = [&](int64_t i) {
          return gated_lanes<bfloat16>(a_, activation, load(gates_ + at + i), load(sums_ + at + i),
                                       column_ + i);
        };
        write_both(row, lanes(0), lanes(kPanel));
      });
    } else if (columns_ < 2 * kPanel) {
      write_row<bfloat16>(a_, sums_ + at, row, column_, columns_);
    } else {
      const auto lanes = [&](int64_t i) {
        const VecF sum = load(sums_ + at + i);
        return a_.bias == nullptr ? sum : sum + load(static_cast<const bfloat16*>(a_.bias) + column_ + i);
      };
      write_both(row, lanes(0), lanes(kPanel));
    }
  }

  // Rounds and writes the columns of two panels by one store.
  void write_both(int64_t row, VecF low, VecF high) const {
    bfloat16* out = static_cast<bfloat16*>(a_.out) + row * a_.out_stride + column_;
    const __m512i line = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    if (is_streamed_) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out), line);
    } else {
      if (row_ + kRowsAhead < last_) _mm_prefetch(out + kRowsAhead * a_.out_stride, _MM_HINT_T1);
      _mm512_storeu_si512(out, line);
    }
  }

  const LinearArgs& a_;
  const TaskRows& rows_;
  const int64_t all_columns_;
  const bool streams_;
  bool is_streamed_ = false;
  const float* sums_ = nullptr;
  const float* gates_ = nullptr;
  int64_t column_ = 0, columns_ = 0;
  int64_t row_ = 0, last_ = 0;  // of the blocks, all of which count as 32 rows
  int64_t at_ = 0;              // of the row's sums
  int64_t credit_ = 0, rate_ = 0;
  alignas(64) float buffer_[2][kBlockSums];
};

}  // namespace
}  // namespace ascend_vllm

#endif
