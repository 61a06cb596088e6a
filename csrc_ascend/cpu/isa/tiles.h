// Tile registers (AMX): eight, of at most 16 rows of 64 bytes; each thread sets their shapes before use.
#pragma once

#ifdef __AMX_BF16__

#include <immintrin.h>

#include <cstdint>

namespace ascend_vllm {
namespace {

constexpr int64_t kTileHeight = 16;  // rows
constexpr int64_t kTileRowBytes = 64;

// A compiler barrier: GCC's tile intrinsics do not declare that they read memory, so that earlier writes could
// be delayed past them. local: a local variable whose writes must be included.
inline void finish_writes(const void* local = nullptr) { asm volatile("" : : "r"(local) : "memory"); }

// Shapes of the tiles, by default 16 rows of 64 bytes, in LDTILECFG's layout.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void shape_tiles(const TileShapes& shapes) {
  finish_writes(&shapes);
  _tile_loadconfig(&shapes);
}

// Configures the tiles for a scope, and releases them at its end, since context switches of a thread with tile
// state are more expensive.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes = {}) { shape_tiles(shapes); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Shapes for sums in tiles 0 to 3 and inputs in 4 and 5: with two tiles of rows 2, 3 and 5 belong to the
// second.
inline void shape_tiles_for(int64_t first_rows, int64_t second_rows) {
  TileShapes shapes;
  const bool has_second = second_rows > 0;
  for (int tile = 0; tile < (has_second ? 6 : 5); ++tile) {
    const bool is_second = has_second && (tile == 2 || tile == 3 || tile == 5);
    shapes.rows[tile] = static_cast<uint8_t>(is_second ? second_rows : first_rows);
  }
  shape_tiles(shapes);
}

}  // namespace
}  // namespace ascend_vllm

#endif
