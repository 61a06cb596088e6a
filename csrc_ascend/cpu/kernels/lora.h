// Products with LoRA adapters, each row of a step with its own: lora_shrink takes rows to their adapter's rank,
// lora_look_up finds an embedding's values of the rank, and lora_expand adds what these make of the rows to the
// rows of a layer's result.
//
// Weights are in panels of 16 outputs, inputs first, so that one load has 16 outputs' weights of an input. A
// row's sums are in the same order whatever other rows there are.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

constexpr int64_t kLoraPanel = 16;

// Most rows of one adapter that share a panel's loads: with 16 registers of 8 lanes there is room for their
// sums.
constexpr int kLoraRows = 6;

// Rows of a step with the same adapter.
struct LoraBlock {
  int32_t slot, count;
  int32_t rows[kLoraRows];
};

struct LoraShrinkArgs {
  DType dtype, weight_dtype;  // of x, and of the weights
  const void* x;              // [rows, inputs], rows x_stride elements apart
  const void* weights;        // [slots, slices, panels, inputs, 16]
  const LoraBlock* blocks;    // [num_blocks]: the rows that have an adapter
  const int32_t* ranks;       // [slots]
  float* out;                 // [rows, slices, panels * 16]; only the panels of a row's rank are written
  float* scratch;             // [threads of the team, kLoraRows, inputs]
  int64_t num_blocks, x_stride, inputs, slices, panels;
};

struct LoraLookUpArgs {
  DType dtype;              // of the tables
  const void* tables;       // [slots, entries, max_rank]
  const int64_t* indices;   // [rows], of entries
  const int32_t* adapters;  // [rows]: slots, negative: none
  const int32_t* ranks;     // [slots]
  float* out;               // [rows, max_rank]; only a row's rank is written
  int64_t rows, entries, max_rank;
};

struct LoraExpandArgs {
  DType dtype, weight_dtype;  // of y, and of the weights
  const float* x;             // as LoraShrinkArgs::out
  const void* weights;        // [slots, panels, max_rank, 16]; max_rank is a multiple of 16
  const LoraBlock* blocks;    // [num_blocks]
  const int32_t* ranks;       // [slots]
  const int64_t* widths;      // [slices]: outputs of each, which begin with a panel
  void* y;                    // [rows, sum of widths], rows y_stride elements apart; added to
  int64_t num_blocks, y_stride, slices, panels, max_rank;
};

ASCEND_VLLM_KERNEL(lora_shrink, LoraShrinkArgs)
ASCEND_VLLM_KERNEL(lora_look_up, LoraLookUpArgs)
ASCEND_VLLM_KERNEL(lora_expand, LoraExpandArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include <algorithm>
#include <array>
#include <type_traits>

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

constexpr int kVecsOfPanel = static_cast<int>(kLoraPanel) / kLanes;

// One panel of one slice for the rows of a block: x [Rows][inputs] → out.
template <int Rows, class W>
inline void shrink_panel(const float* const* x, const W* panel, int64_t inputs, float* const* out) {
  VecF sums[Rows][kVecsOfPanel];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVecsOfPanel; ++v) sums[r][v] = set1(0.0f);
  }
  for (int64_t k = 0; k < inputs; ++k, panel += kLoraPanel) {
    VecF weights[kVecsOfPanel];
    for (int v = 0; v < kVecsOfPanel; ++v) weights[v] = load(panel + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const VecF value = set1(x[r][k]);
      for (int v = 0; v < kVecsOfPanel; ++v) sums[r][v] = fma(weights[v], value, sums[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVecsOfPanel; ++v) store(out[r] + v * kLanes, sums[r][v]);
  }
}

// Calls body(std::integral_constant<int, n>) for a number of rows.
template <class Body>
inline void with_rows(int count, const Body& body) {
  switch (count) {
    case 1:
      return body(std::integral_constant<int, 1>{});
    case 2:
      return body(std::integral_constant<int, 2>{});
    case 3:
      return body(std::integral_constant<int, 3>{});
    case 4:
      return body(std::integral_constant<int, 4>{});
    case 5:
      return body(std::integral_constant<int, 5>{});
    default:
      return body(std::integral_constant<int, kLoraRows>{});
  }
}

// All panels of slices [first, last) of a block. `scratch` has room for the block's rows in float32.
template <class T, class W>
inline void shrink_block(const LoraShrinkArgs& a, const LoraBlock& block, int64_t first, int64_t last,
                         float* scratch) {
  const float* x[kLoraRows];
  for (int r = 0; r < block.count; ++r) {
    float* target = scratch + r * a.inputs;
    const T* source = static_cast<const T*>(a.x) + block.rows[r] * a.x_stride;
    for_lanes(
        a.inputs, [&](int64_t i) { store(target + i, load(source + i)); },
        [&](int64_t i, int rest) { store_n(target + i, load_n(source + i, rest), rest); });
    x[r] = target;
  }
  const int64_t panel_size = a.inputs * kLoraPanel, used = (a.ranks[block.slot] + kLoraPanel - 1) / kLoraPanel;
  for (int64_t slice = first; slice < last; ++slice) {
    const W* panel = static_cast<const W*>(a.weights) + (block.slot * a.slices + slice) * a.panels * panel_size;
    for (int64_t p = 0; p < used; ++p, panel += panel_size) {
      float* out[kLoraRows];
      for (int r = 0; r < block.count; ++r) {
        out[r] = a.out + ((block.rows[r] * a.slices + slice) * a.panels + p) * kLoraPanel;
      }
      with_rows(block.count, [&](auto rows) { shrink_panel<decltype(rows)::value>(x, panel, a.inputs, out); });
    }
  }
}

template <class T, class W>
void lora_shrink(const LoraShrinkArgs& a) {
  // with few blocks their slices are shared among the threads, each of which widens the rows for itself
  constexpr int64_t kManyBlocks = 8;
  const int64_t parts = a.num_blocks < kManyBlocks ? a.slices : 1, items = a.num_blocks * parts;
  const int threads = items == 1 ? 1 : threads_for(a.num_blocks * a.slices * kLoraRows * a.inputs * kLoraPanel);
  run_parts(items, threads, [&](int64_t item, int64_t thread) {
    const int64_t first = item % parts;
    shrink_block<T, W>(a, a.blocks[item / parts], first, parts == 1 ? a.slices : first + 1,
                       a.scratch + thread * kLoraRows * a.inputs);
  });
}

template <class W>
void lora_look_up(const LoraLookUpArgs& a) {
  parallel_for(a.rows, a.max_rank, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int32_t slot = a.adapters[row];
      if (slot < 0) continue;
      const W* source = static_cast<const W*>(a.tables) + (slot * a.entries + a.indices[row]) * a.max_rank;
      float* target = a.out + row * a.max_rank;
      for_lanes(
          a.ranks[slot], [&](int64_t i) { store(target + i, load(source + i)); },
          [&](int64_t i, int rest) { store_n(target + i, load_n(source + i, rest), rest); });
    }
  });
}

// Vectors of outputs that are added up at a time, so that enough sums are under way in few rows, too.
template <int Rows>
constexpr int kExpandVecs = std::array{0, 8, 4, 3, 3, 2, 2}[Rows];

// Adds `Vecs` vectors of outputs, from vector `first` of a slice on, to the rows of a block. Of the last one
// there may be fewer lanes than a vector has.
template <int Rows, int Vecs, class T, class W>
inline void expand_vecs(const float* const* x, const W* panels, int64_t panel_size, int64_t rank, T* const* y,
                        int64_t first, int lanes = kLanes) {
  const W* weights[Vecs];
  VecF sums[Rows][Vecs];
  for (int v = 0; v < Vecs; ++v) {
    weights[v] = panels + (first + v) / kVecsOfPanel * panel_size + (first + v) % kVecsOfPanel * kLanes;
    for (int r = 0; r < Rows; ++r) sums[r][v] = set1(0.0f);
  }
  for (int64_t k = 0; k < rank; ++k) {
    VecF loaded[Vecs];
    for (int v = 0; v < Vecs; ++v) loaded[v] = load(weights[v] + k * kLoraPanel);
    for (int r = 0; r < Rows; ++r) {
      const VecF value = set1(x[r][k]);
      for (int v = 0; v < Vecs; ++v) sums[r][v] = fma(loaded[v], value, sums[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vecs; ++v) {
      T* target = y[r] + (first + v) * kLanes;
      if (lanes == kLanes) {
        store(target, load(target) + sums[r][v]);
      } else {
        store_n(target, load_n(target, lanes) + sums[r][v], lanes);
      }
    }
  }
}

// Adds the outputs [first, last) of a slice to the rows of a block; `first` begins a panel.
template <int Rows, class T, class W>
inline void expand_slice(const float* const* x, const W* panels, int64_t panel_size, int64_t rank, T* const* y,
                         int64_t first, int64_t last) {
  constexpr int kVecs = kExpandVecs<Rows>;
  int64_t vec = first / kLanes;
  const int64_t full = last / kLanes;
  for (; vec + kVecs <= full; vec += kVecs) {
    expand_vecs<Rows, kVecs>(x, panels, panel_size, rank, y, vec);
  }
  for (; vec < full; ++vec) expand_vecs<Rows, 1>(x, panels, panel_size, rank, y, vec);
  const int rest = static_cast<int>(last % kLanes);
  if (rest > 0) expand_vecs<Rows, 1>(x, panels, panel_size, rank, y, vec, rest);
}

// Panels [first, last) of a block.
template <class T, class W>
inline void expand_block(const LoraExpandArgs& a, const LoraBlock& block, int64_t first, int64_t last) {
  const int64_t panel_size = a.max_rank * kLoraPanel;
  const W* panels = static_cast<const W*>(a.weights) + block.slot * a.panels * panel_size;
  int64_t column = 0, slice_panel = 0;  // the slice's first output and panel
  for (int64_t slice = 0; slice < a.slices && slice_panel < last; ++slice) {
    const int64_t width = a.widths[slice], begin = std::max<int64_t>(0, first - slice_panel) * kLoraPanel;
    const int64_t end = std::min(width, (last - slice_panel) * kLoraPanel);
    if (begin < end) {
      const float* x[kLoraRows];
      T* y[kLoraRows];
      for (int r = 0; r < block.count; ++r) {
        x[r] = a.x + (block.rows[r] * a.slices + slice) * a.max_rank;
        y[r] = static_cast<T*>(a.y) + block.rows[r] * a.y_stride + column;
      }
      with_rows(block.count, [&](auto rows) {
        expand_slice<decltype(rows)::value>(x, panels + slice_panel * panel_size, panel_size,
                                            a.ranks[block.slot], y, begin, end);
      });
    }
    slice_panel += (width + kLoraPanel - 1) / kLoraPanel;
    column += width;
  }
}

template <class T, class W>
void lora_expand(const LoraExpandArgs& a) {
  // an item is a block and a run of panels
  constexpr int64_t kRun = 32;
  const int64_t runs = (a.panels + kRun - 1) / kRun;
  parallel_for(a.num_blocks * runs, kLoraRows * kRun * kLoraPanel * kLoraPanel,
               [&](int64_t begin, int64_t end) {
                 for (int64_t item = begin; item < end; ++item) {
                   const int64_t first = item % runs * kRun;
                   expand_block<T, W>(a, a.blocks[item / runs], first, std::min(first + kRun, a.panels));
                 }
               });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(lora_shrink, LoraShrinkArgs) {
  with_dtype(args.dtype, [&](auto tag) {
    with_dtype(args.weight_dtype, [&](auto weight) { lora_shrink<decltype(tag), decltype(weight)>(args); });
  });
}
ASCEND_VLLM_DEFINE_KERNEL(lora_look_up, LoraLookUpArgs) {
  with_dtype(args.dtype, [&](auto tag) { lora_look_up<decltype(tag)>(args); });
}
ASCEND_VLLM_DEFINE_KERNEL(lora_expand, LoraExpandArgs) {
  with_dtype(args.dtype, [&](auto tag) {
    with_dtype(args.weight_dtype, [&](auto weight) { lora_expand<decltype(tag), decltype(weight)>(args); });
  });
}

}  // namespace ascend_vllm

#endif
