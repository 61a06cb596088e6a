// Panels of query rows with vector lanes along the rows, shared by the kernels with vectors
// (paged_query_lanes.h) and with AMX tiles (paged_query_tiles.h).
//
// The rows of a work item are divided into panels of kPanelVecs vectors; the last one may have a single vector.
// Scores of a panel are [keys, lanes].
#pragma once

#include "cpu/kernels/paged_softmax.h"

namespace ascend_vllm {
namespace {

constexpr int kPanelVecs = 2;
constexpr int kPanelLanes = kPanelVecs * kLanes;
// Lanes of all panels of an item.
constexpr int kMaxLanes = 128 + kPanelLanes;

// Calls body(first row, constant number of vectors) for each panel.
template <class Body>
inline void for_panels(int64_t rows, const Body& body) {
  for (int64_t first = 0; first < rows; first += kPanelLanes) {
    if (rows - first > kLanes) {
      body(first, std::integral_constant<int, kPanelVecs>{});
    } else {
      body(first, std::integral_constant<int, 1>{});
    }
  }
}

// Keys begin … end-1 of the tile that are visible to some row of a panel.
struct SeenKeys {
  int64_t low, high;
};
inline SeenKeys seen_keys(const QueryRows& rows, int64_t first, int64_t width, int64_t tile, int64_t begin,
                          int64_t end) {
  const int64_t last = min_of(first + width, rows.count()) - 1;
  return {max_of(begin, rows.seen_from(rows.begin + first) - tile),
          min_of(end, rows.position(rows.begin + last) + 1 - tile)};
}

// Masks the scores of keys low … high-1 that are not visible to a row. Rows ascend in position, so these are a
// prefix and a suffix of the lanes.
template <int kWidth>
inline void hide(const QueryRows& rows, int64_t first, int64_t tile, int64_t low, int64_t high, float* scores) {
  const int64_t base = rows.begin + first;
  const bool hides_past = rows.window > 0 && tile + low < rows.seen_from(base + kWidth - 1);
  // without a window, keys up to the first row's position are visible to all rows
  const int64_t begin = hides_past ? low : max_of(low, rows.position(base) + 1 - tile);
  for (int64_t n = begin; n < high; ++n) {
    // the first token to which the key is visible, and the first to which it no longer is
    const int64_t token = tile + n - rows.first_position;
    const int64_t from = clamp(token * rows.group - base, 0, kWidth);
    const int64_t to = rows.window > 0 ? clamp((token + rows.window) * rows.group - base, 0, kWidth) : kWidth;
    fill(scores + n * kWidth, from, -__builtin_inff());
    fill(scores + n * kWidth + to, kWidth - to, -__builtin_inff());
  }
}

// Soft cap and ALiBi of a panel, for keys low … high-1.
template <int kWidth>
inline void change_scores(const QueryRows& rows, int64_t first, int64_t tile, int64_t low, int64_t high,
                          float* scores) {
  float slopes[kWidth], positions[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) {
    const int64_t row = rows.begin + first + lane;
    slopes[lane] = rows.slope(row);
    positions[lane] = static_cast<float>(rows.position(row));
  }
  for (int64_t n = low; n < high; ++n) {
    const VecF key = set1(static_cast<float>(tile + n));
    for (int lane = 0; lane < kWidth; lane += kLanes) {
      float* at = scores + n * kWidth + lane;
      store(at, changed_scores(load(at), rows.soft_cap, load(slopes + lane), key - load(positions + lane)));
    }
  }
}

// The keys or values of a tile: runs of `run` contiguous rows, a power of two.
template <class Key>
struct TileRows {
  const Key* runs[kTileKeys / 16];
  int64_t run;
  int64_t size;  // elements of a row

  const Key* at(int64_t n) const { return runs[n / run] + n % run * size; }
  int64_t run_end(int64_t n) const { return n / run * run + run; }
};

// Rows begin … end-1 of a tile, in place in the cache.
template <class T>
inline TileRows<T> rows_in_cache(const HeadBlocks<T>& blocks, const T* cache, int64_t tile, int64_t begin,
                                 int64_t end) {
  TileRows<T> rows{{}, min_of(blocks.block_size(), kTileKeys), blocks.head_size};
  // only blocks with keys in use, since other entries of the block table may be invalid
  for (int64_t run = begin / rows.run; run * rows.run < end; ++run) {
    rows.runs[run] = cache + blocks.offset(tile + run * rows.run);
  }
  return rows;
}

}  // namespace
}  // namespace ascend_vllm
