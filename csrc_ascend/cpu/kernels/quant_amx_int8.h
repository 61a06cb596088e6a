// Rows of 8-bit numbers by 8-bit weights with AMX tiles, which read panels as they are: a row of a tile is a
// word's 16 outputs. Sums are exact.
#pragma once

#ifdef __AMX_BF16__

#include "cpu/isa/tiles.h"

namespace ascend_vllm {
namespace {

constexpr int64_t kByteInputs = 64;         // 8-bit inputs of a tile
constexpr int64_t kByteBlockInputs = 1024;  // maximum inputs of many rows at a time

// Rows of 8-bit numbers from `x` on, padded with zeros to whole steps, and some of their inputs; in bytes.
struct PaddedRows {
  const char* x;
  int64_t stride, begin, end;
};

// A panel's weights of these inputs. Those behind the last complete step are copied, with zeros behind them.
struct BytePanel {
  const char* complete;
  alignas(64) char rest[kTileHeight * kTileRowBytes];

  void set(const uint32_t* codes, int64_t begin, int64_t end) {
    complete = reinterpret_cast<const char*>(codes) + begin / 4 * 64;
    const int64_t words = (end - begin) % kByteInputs;
    if (words == 0) return;
    const int64_t bytes = (words + 3) / 4 * 64;
    __builtin_memcpy(rest, complete + (end - begin - words) / 4 * 64, bytes);
    __builtin_memset(rest + bytes, 0, sizeof rest - bytes);
  }
  const char* step(int64_t input, int64_t inputs) const {
    return input + kByteInputs <= inputs ? complete + input * 16 : rest;
  }
};

// Prefetches a tile of weights further on, of panels that follow one another in memory, or does nothing.
template <bool kFetches>
inline void fetch_bytes(const BytePanel& panel, int64_t input, int64_t inputs, int64_t others) {
  if constexpr (kFetches) {
    const int64_t left = (inputs - input) * 16;
    const char* from = panel.complete + input * 16 + kCodesAhead + (left > kCodesAhead ? 0 : others);
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) __builtin_prefetch(from + line * 64);
  }
}

// Tiles 0 to 3 = zeros, or the sums of two tiles of rows or one by panels.
template <bool kTwoRows, int kPanels>
inline void start_sums(bool is_first, const int32_t* sums) {
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  constexpr int64_t kBytes = kSumsStride * sizeof(float);
  const int32_t* second = sums + kTileHeight * kSumsStride;
  _tile_loadd(0, sums, kBytes);
  if constexpr (kPanels > 1) _tile_loadd(1, sums + kPanel, kBytes);
  if constexpr (kTwoRows) _tile_loadd(2, second, kBytes);
  if constexpr (kTwoRows && kPanels > 1) _tile_loadd(3, second + kPanel, kBytes);
}

// int32 sums[rows <= 16][4 of 16] = rows by four panels, all inputs.
__attribute__((noinline)) inline void add_bytes_wide(const PaddedRows& r, const BytePanel* panels,
                                                     int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t inputs = r.end - r.begin, others = 3 * (panels[1].complete - panels[0].complete);
  for (int64_t k = 0; k < inputs; k += kByteInputs) {
    const auto panel = [&](int p) __attribute__((always_inline)) {
      fetch_bytes<true>(panels[p], k, inputs, others);
      return panels[p].step(k, inputs);
    };
    _tile_loadd(4, r.x + r.begin + k, r.stride);
    _tile_loadd(5, panel(0), 64);
    _tile_dpbsud(0, 4, 5);
    _tile_loadd(6, panel(1), 64);
    _tile_dpbsud(1, 4, 6);
    _tile_loadd(7, panel(2), 64);
    _tile_dpbsud(2, 4, 7);
    _tile_loadd(5, panel(3), 64);
    _tile_dpbsud(3, 4, 5);
  }
  constexpr int64_t kBytes = kSumsStride * sizeof(float);
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + kPanel, kBytes);
  _tile_stored(2, sums + 2 * kPanel, kBytes);
  _tile_stored(3, sums + 3 * kPanel, kBytes);
}

// int32 sums[rows <= 32][kPanels of 16] (+)= one tile of rows or two by one or two panels.
template <bool kTwoRows, int kPanels, bool kFetches>
__attribute__((noinline)) void add_bytes_square(const PaddedRows& r, const BytePanel* panels, int32_t* sums) {
  start_sums<kTwoRows, kPanels>(r.begin == 0, sums);
  int32_t* second_sums = sums + kTileHeight * kSumsStride;
  const int64_t inputs = r.end - r.begin;
  const int64_t others = kPanels == 2 ? panels[1].complete - panels[0].complete : 0;
  for (int64_t k = 0; k < inputs; k += kByteInputs) {
    const char* x = r.x + r.begin + k;
    fetch_bytes<kFetches>(panels[0], k, inputs, others);
    if constexpr (kPanels == 2) fetch_bytes<kFetches>(panels[1], k, inputs, others);
    _tile_stream_loadd(4, x, r.stride);
    _tile_loadd(6, panels[0].step(k, inputs), 64);
    _tile_dpbsud(0, 4, 6);
    if constexpr (kPanels == 2) {
      _tile_loadd(7, panels[1].step(k, inputs), 64);
      _tile_dpbsud(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_stream_loadd(5, x + kTileHeight * r.stride, r.stride);
      _tile_dpbsud(2, 5, 6);
      if constexpr (kPanels == 2) _tile_dpbsud(3, 5, 7);
    }
  }
  constexpr int64_t kBytes = kSumsStride * sizeof(float);
  _tile_stored(0, sums, kBytes);
  if constexpr (kPanels == 2) _tile_stored(1, sums + kPanel, kBytes);
  if constexpr (kTwoRows) _tile_stored(2, second_sums, kBytes);
  if constexpr (kTwoRows && kPanels == 2) _tile_stored(3, second_sums + kPanel, kBytes);
}

// sums[rows][kSumsStride] = rows from `row` on by panels.
inline void multiply_int8_in_tiles(const Int8LinearArgs& a, const int32_t* x, int64_t x_stride,
                                   const int32_t* totals, int64_t row, int64_t rows, int64_t panel,
                                   int64_t panels, float* sums) {
  const Tiles tiles;
  const int64_t words = (a.in_features + 3) / 4;
  BytePanel own[kTilePieces.panels];
  int32_t* whole = reinterpret_cast<int32_t*>(sums);
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t p = 0; p < panels; ++p) own[p].set(a.codes + (panel + p) * words * kPanel, begin, end);
    finish_writes(own);
    // rows and panels from r and p on; the first rows prefetch the weights for the others
    const auto square = [&]<bool kTwo, int kPanels>(const PaddedRows& part, int64_t r, int64_t p) {
      int32_t* to = whole + r * kSumsStride + p * kPanel;
      r == 0 ? add_bytes_square<kTwo, kPanels, true>(part, own + p, to)
             : add_bytes_square<kTwo, kPanels, false>(part, own + p, to);
    };
    for (int64_t p = 0; p < panels;) {
      const int64_t together = rows <= kTileHeight && panels - p >= 4 ? 4 : std::min<int64_t>(2, panels - p);
      for (int64_t r = 0; r < rows; r += 2 * kTileHeight) {
        const int64_t first = std::min(kTileHeight, rows - r);
        const int64_t second = std::min(kTileHeight, rows - r - first);
        if (r == 0 || r + 2 * kTileHeight > rows) shape_tiles_for(first, second);
        const PaddedRows part{reinterpret_cast<const char*>(x + r * x_stride), x_stride * 4, begin, end};
        if (together == 4) {
          add_bytes_wide(part, own + p, whole + p * kPanel);
        } else if (together == 2) {
          second > 0 ? square.template operator()<true, 2>(part, r, p)
                     : square.template operator()<false, 2>(part, r, p);
        } else {
          second > 0 ? square.template operator()<true, 1>(part, r, p)
                     : square.template operator()<false, 1>(part, r, p);
        }
        if (end < a.in_features) continue;
        finish_writes(sums);
        for (int64_t i = p; i < p + together; ++i) {
          const Int8Results results(a, panel + i);
          for (int64_t own_row = r; own_row < r + first + second; ++own_row) {
            const int64_t at = own_row * kSumsStride + i * kPanel;
            store(sums + at, results.of(load_i(whole + at), totals[own_row], row + own_row, 0));
          }
        }
      }
      p += together;
    }
  };
  // a few rows read the weights once, so that blocks would only cost time
  const int64_t most = rows <= 2 * kTileHeight ? a.in_features : kByteBlockInputs;
  for (int64_t begin = 0; begin < a.in_features; begin += most) {
    add(begin, std::min(a.in_features, begin + most));
  }
}

}  // namespace
}  // namespace ascend_vllm

#endif
