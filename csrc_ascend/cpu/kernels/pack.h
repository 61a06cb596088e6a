// Packs weights into panels of 16 outputs and unpacks rows; the dtype does not matter, so sizes are in bytes.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

// A unit is the contiguous part of one output: a float32 or float16 element, or a pair of bfloat16 ones.
struct PackArgs {
  const char* weight;  // [rows, in_features], row n starts at n * row_bytes
  char* packed;        // [panels, units, 16] units
  int64_t first_row;   // of the packed weight, at which row 0 goes
  int64_t rows, in_features, row_bytes;
  int64_t element_bytes;  // 2 or 4
  int64_t unit_bytes;     // element_bytes, or 4 for pairs
};

ASCEND_VLLM_KERNEL(pack_panels, PackArgs)

struct UnpackRowsArgs {
  const char* packed;      // as above
  const int64_t* indices;  // [count], of rows
  char* out;               // [count, in_features], contiguous
  int64_t count, in_features, element_bytes, unit_bytes;
};

ASCEND_VLLM_KERNEL(unpack_rows, UnpackRowsArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

constexpr int64_t kPackPanel = 16;
// units of a panel that are written while they are in the L1 cache
constexpr int64_t kPackTile = 64;

// Writes `rows` outputs of a panel, from lane `lane` on; the others are unchanged.
template <class Unit>
void pack_lanes(const PackArgs& a, const char* weight, int64_t lane, int64_t rows, Unit* packed) {
  const int64_t unit = sizeof(Unit);
  const int64_t row_bytes = a.in_features * a.element_bytes;
  const int64_t whole = row_bytes / unit;
  for (int64_t begin = 0; begin < whole; begin += kPackTile) {
    const int64_t end = begin + kPackTile < whole ? begin + kPackTile : whole;
    for (int64_t n = 0; n < rows; ++n) {
      const char* from = weight + n * a.row_bytes;
      Unit* to = packed + lane + n;
      for (int64_t k = begin; k < end; ++k)
        __builtin_memcpy(to + k * kPackPanel, from + k * unit, sizeof(Unit));
    }
  }
  if (whole * unit == row_bytes) return;
  // with an odd number of inputs the last pair has only one
  for (int64_t n = 0; n < rows; ++n) {
    Unit last{};
    __builtin_memcpy(&last, weight + n * a.row_bytes + whole * unit, row_bytes - whole * unit);
    packed[whole * kPackPanel + lane + n] = last;
  }
}

template <class Unit>
void pack_all(const PackArgs& a) {
  const int64_t units = (a.in_features * a.element_bytes + sizeof(Unit) - 1) / sizeof(Unit);
  const int64_t first_panel = a.first_row / kPackPanel, last_row = a.first_row + a.rows;
  const int64_t panels = (last_row + kPackPanel - 1) / kPackPanel - first_panel;
  Unit* packed = reinterpret_cast<Unit*>(a.packed);
  parallel_for(panels, units * kPackPanel, [&](int64_t begin, int64_t end) {
    for (int64_t p = first_panel + begin; p < first_panel + end; ++p) {
      const int64_t from = std::max(a.first_row, p * kPackPanel), to = std::min(last_row, (p + 1) * kPackPanel);
      const char* weight = a.weight + (from - a.first_row) * a.row_bytes;
      pack_lanes(a, weight, from % kPackPanel, to - from, packed + p * units * kPackPanel);
    }
  });
}

template <class Unit>
void unpack_all(const UnpackRowsArgs& a) {
  const int64_t row_bytes = a.in_features * a.element_bytes;
  const int64_t whole = row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t units =
      (row_bytes + static_cast<int64_t>(sizeof(Unit)) - 1) / static_cast<int64_t>(sizeof(Unit));
  const Unit* packed = reinterpret_cast<const Unit*>(a.packed);
  parallel_for(a.count, 4 * units, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = a.indices[i];
      const Unit* from = packed + row / kPackPanel * units * kPackPanel + row % kPackPanel;
      char* to = a.out + i * row_bytes;
      for (int64_t k = 0; k < whole; ++k)
        __builtin_memcpy(to + k * sizeof(Unit), from + k * kPackPanel, sizeof(Unit));
      if (whole < units)
        __builtin_memcpy(to + whole * sizeof(Unit), from + whole * kPackPanel, row_bytes % sizeof(Unit));
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(pack_panels, PackArgs) {
  args.unit_bytes == 4 ? pack_all<uint32_t>(args) : pack_all<uint16_t>(args);
}

ASCEND_VLLM_DEFINE_KERNEL(unpack_rows, UnpackRowsArgs) {
  args.unit_bytes == 4 ? unpack_all<uint32_t>(args) : unpack_all<uint16_t>(args);
}

}  // namespace ascend_vllm

#endif
