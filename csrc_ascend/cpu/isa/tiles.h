// Tile registers (AMX): eight of at most 16 rows of 64 bytes, of shapes that a thread sets before it uses them.
#pragma once

#ifdef __AMX_BF16__

#include <immintrin.h>

#include <cstdint>

namespace ascend_vllm {
namespace {

constexpr int64_t kTileHeight = 16;  // rows
constexpr int64_t kTileRowBytes = 64;

// GCC's intrinsics do not tell that they read memory: what was written for them need not be there before this.
// local: a variable of the function itself, which nothing else knows of unless it is named.
inline void finish_writes(const void* local = nullptr) { asm volatile("" : : "r"(local) : "memory"); }

// Rows of each tile, of 64 bytes each; laid out as LDTILECFG reads it.
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

// The tiles of a scope: whole ones until others are asked for. The registers are given back at its end, for a
// thread that holds them is dearer to switch.
class Tiles {
 public:
  Tiles() { shape_tiles({}); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace ascend_vllm

#endif
