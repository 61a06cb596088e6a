// Products x @ weight.T + bias with a weight packed in panels of 16 output columns; if gated, an activation is
// applied to the first half of the columns, which is then multiplied by the second.
//
// Every output is the sum, over slices of kSlice inputs, of a chain of fused multiply-adds in the order of the
// inputs. Tiling and threads do not change that, so a row's result does not depend on the other rows.
#pragma once

#include "cpu/dispatch.h"
#include "cpu/kernels/gate.h"

namespace ascend_vllm {

// float32 and float16 weights are [panels, in, 16]; bfloat16 ones [panels, (in + 1) / 2, 16, 2]. Padding is
// zero.
struct LinearArgs {
  DType dtype;
  const void* x;  // row t starts at t * x_stride elements
  const void* packed;
  const void* bias;  // [out_features] or null
  void* out;         // [rows, out_features], or half as wide if it is gated; row t starts at t * out_stride
  void* workspace;   // linear_workspace(rows, in_features) floats
  int64_t rows, x_stride, out_stride, in_features, out_features;
  bool is_gated;  // out_features is a multiple of 32 then
  Gate gate;
  int64_t next;           // elements from a task's panels to those that its thread probably reads next, or 0
  const int32_t* x_rows;  // rows of x that the rows are, only of tasks that copy them; null: the same
};

inline int64_t linear_workspace(int64_t rows, int64_t in_features) {
  return rows * ((in_features + 1) / 2 * 2);
}

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

constexpr int64_t kPanel = 16;      // columns of a panel
constexpr int64_t kGroup = 4;       // maximum panels of a task
constexpr int64_t kTaskRows = 192;  // maximum rows of a task; half as many if it is gated
constexpr int64_t kSlice = 512;     // inputs between two updates of the sums in memory; even
constexpr int kPanelVectors = kPanel / kLanes;
// With this many rows memory is the bottleneck and panels are prefetched; a single row only streams them.
constexpr int64_t kMinPrefetchRows = 2, kMaxPrefetchRows = 10;
// Prefetch distance in bytes: multiplying with so many takes as long as a memory access.
constexpr int64_t kAhead = 2048;
// The same of rows that are multiplied faster than memory delivers weights. Measured with two threads of an AMD
// EPYC (Zen 5), weights from memory: 8 rows of 896 inputs by 9,728 outputs in bfloat16 take 293 us with it and
// 396 with 2,048, a single row 279.
constexpr int64_t kFarAhead = kPanelVectors == 1 ? 8192 : kAhead;
// Tasks of at most so many rows have more panels, since every task's beginning waits for memory: 8 rows take
// 365 instead of 458 us then.
constexpr int64_t kStreamedRows = kPanelVectors == 1 ? 64 : 0;
constexpr int64_t kStreamPanels = 16;  // maximum panels of such a task

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// Type of the inputs that weights of type T are multiplied by: float32, or bfloat16 with an instruction for
// pairs.
template <class T, bool kPairDots = is_same<T, bfloat16> && kHasPairDots>
struct InputOf {
  using type = float;
};
template <class T>
struct InputOf<T, true> {
  using type = bfloat16;
};

// Whether weights are pairs that must be unpacked, which takes registers.
template <class T>
constexpr bool kAreSplit = is_same<T, bfloat16> && !kHasPairDots;
// Rows of a tile that fit the registers beside the weights.
template <class T>
constexpr int kTileRows = kAreSplit<T> ? kMaxPairRows : kMaxRows;

// Tiles of many rows by dot products of pairs, which take no registers for unpacking: with one register a panel
// 28 of 32 are sums, with four as many as without them.
constexpr int kTallRows = kPanelVectors == 1 ? 14 : kMaxRows, kTallPanels = 2;
template <class T, class X>
constexpr int kManyRowsTile = is_same<X, float> ? kTileRows<T> : kTallRows;
// Maximum rows of a tile by a single panel, which is read once as one stream; 0: there are none. With up to
// kTileRows<T> rows tiles of more panels read them once, too. Measured as above: 12 rows take 333 us instead of
// the 601 of two tiles of 6 rows by four panels.
template <class T, class X>
constexpr int kMaxStreamRows = is_same<X, float> || kPanelVectors > 1 ? 0 : kTallRows;

// The weights of one input; of bfloat16 pairs, the one with index `step`.
template <class T>
inline VecF load_step(const T* columns, int) {
  return load(columns);
}
inline VecF load_step(const bfloat16* columns, int step) {
  return step == 0 ? even_of_pairs(load_pairs(columns)) : odd_of_pairs(load_pairs(columns));
}

// sums[kRows][kPanels * 16] (+)= x[kRows][begin, end) times the panels; begin is even. X is float, or bfloat16
// with an instruction for pairs. Weights `ahead` elements further on are prefetched.
template <int kRows, int kPanels, bool kFetches, class X, class T>
inline void multiply_tile(const X* x, int64_t x_stride, const T* w, int64_t panel_size, int64_t begin,
                          int64_t end, float* sums, int64_t sums_stride, int64_t ahead) {
  constexpr int kVectors = kPanels * kPanelVectors;
  constexpr int kStep = is_same<T, bfloat16> ? 2 : 1;
  VecF acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) acc[r][v] = set1(0.0f);
  }
  const auto columns = [&](int64_t k, int v) {
    return w + v / kPanelVectors * panel_size + k * kPanel + v % kPanelVectors * kLanes * kStep;
  };
  // Columns in registers, and one broadcast input at a time: fits kTileRows<T> rows without spills.
  for (int64_t k = begin; k < end; k += kStep) {
    if constexpr (kFetches) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(w + p * panel_size + k * kPanel + ahead);
      }
    }
    if constexpr (!is_same<X, float>) {
      PairBF16 pairs[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) pairs[v] = load_pairs(columns(k, v));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const PairBF16 input = set1_pair(x + r * x_stride + k);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_pairs(acc[r][v], input, pairs[v]);
      }
    } else {
      // Not a loop, which GCC would not unroll: selecting the half of each pair would take a fifth of the time.
      const auto multiply = [&](int step) __attribute__((always_inline)) {
        VecF column[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) column[v] = load_step(columns(k, v), step);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const VecF input = set1(x[r * x_stride + k + step]);
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(input, column[v], acc[r][v]);
        }
      };
      multiply(0);
      if constexpr (kStep == 2) multiply(1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      float* sum = sums + r * sums_stride + v * kLanes;
      store(sum, begin == 0 ? acc[r][v] : load(sum) + acc[r][v]);
    }
  }
}

// One slice of kRows rows by `panels` panels.
template <int kRows, bool kFetches, class X, class T>
inline void multiply_panels(const X* x, int64_t x_stride, const T* w, int64_t panel_size, int64_t panels,
                            int64_t begin, int64_t end, float* sums, int64_t ahead) {
  constexpr int kPanels = kRows > kTileRows<T> ? kTallPanels : panels_of(kRows, kAreSplit<T>);
  constexpr int64_t kSumsStride = kGroup * kPanel;
  int64_t p = 0;
  for (; p + kPanels <= panels; p += kPanels) {
    multiply_tile<kRows, kPanels, kFetches>(x, x_stride, w + p * panel_size, panel_size, begin, end,
                                            sums + p * kPanel, kSumsStride, ahead);
  }
  for (; p < panels; ++p) {
    multiply_tile<kRows, 1, kFetches>(x, x_stride, w + p * panel_size, panel_size, begin, end,
                                      sums + p * kPanel, kSumsStride, ahead);
  }
}

// Chooses the tile of `rows` <= kRows rows.
template <int kRows, bool kFetches, class X, class T>
inline void multiply_rows(int64_t rows, const X* x, int64_t x_stride, const T* w, int64_t panel_size,
                          int64_t panels, int64_t begin, int64_t end, float* sums, int64_t ahead = 0) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return multiply_rows<kRows - 1, kFetches>(rows, x, x_stride, w, panel_size, panels, begin, end, sums,
                                                ahead);
    }
  }
  multiply_panels<kRows, kFetches>(x, x_stride, w, panel_size, panels, begin, end, sums, ahead);
}

template <class T>
inline void write_row(const LinearArgs& a, const float* sums, int64_t row, int64_t column, int64_t columns) {
  T* out = static_cast<T*>(a.out) + row * a.out_stride + column;
  const T* bias = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + column;
  for_lanes(
      columns, [&](int64_t i) { store(out + i, bias ? load(sums + i) + load(bias + i) : load(sums + i)); },
      [&](int64_t i, int rest) {
        const VecF sum = load_n(sums + i, rest);
        store_n(out + i, bias ? sum + load_n(bias + i, rest) : sum, rest);
      });
}

// The weights that follow those of a slice: the next slice of the same panels, or the first one of the next
// panels, as elements from here.
struct NextSlice {
  int64_t inputs, next;  // 0: not known

  int64_t from(int64_t begin) const {
    if (begin + kSlice < inputs) return kSlice * kPanel;
    return next == 0 ? 0 : next - begin * kPanel;
  }
};

// A slice of a tile, which prefetches weights. Not inlined into loops that need all registers.
template <int kRows, class T, class X>
__attribute__((noinline)) void multiply_and_fetch(int64_t rows, const X* x, int64_t x_stride, const T* w,
                                                  int64_t panel_size, int64_t panels, int64_t begin,
                                                  int64_t end, float* sums, int64_t ahead) {
  multiply_rows<kRows, true>(rows, x, x_stride, w, panel_size, panels, begin, end, sums, ahead);
}

// All inputs of `rows` <= kRows rows by some panels, one after the other: one stream from memory.
template <int kRows, class T, class X>
inline void multiply_stream(int64_t rows, const X* x, int64_t x_stride, const T* w, int64_t panel_size,
                            int64_t panels, int64_t inputs, float* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return multiply_stream<kRows - 1>(rows, x, x_stride, w, panel_size, panels, inputs, sums);
    }
  }
  for (int64_t p = 0; p < panels; ++p) {
    for (int64_t begin = 0; begin == 0 || begin < inputs; begin += kSlice) {
      const int64_t end = begin + kSlice < inputs ? begin + kSlice : inputs;
      multiply_tile<kRows, 1, true>(x, x_stride, w + p * panel_size, panel_size, begin, end, sums + p * kPanel,
                                    kGroup * kPanel, kFarAhead / static_cast<int64_t>(sizeof(T)));
    }
  }
}

// All inputs of a few rows by some panels. The first rows load each slice of a panel into the cache for the
// others, the second ones the slice after it. Not inlined into the loops for many rows, which need all
// registers.
template <class T, class X>
__attribute__((noinline)) void multiply_few(const X* x, int64_t x_stride, int64_t rows, const T* w,
                                            int64_t panel_size, int64_t panels, int64_t inputs, float* sums,
                                            int64_t next) {
  const int64_t tiles = (rows + kTileRows<T> - 1) / kTileRows<T>, first = (rows + tiles - 1) / tiles;
  const int64_t together = panels_of(static_cast<int>(first), kAreSplit<T>);
  for (int64_t p = 0; p < panels; p += together) {
    const int64_t count = together < panels - p ? together : panels - p;
    const NextSlice slice{inputs, p + together < panels ? together * panel_size : next};
    for (int64_t begin = 0; begin == 0 || begin < inputs; begin += kSlice) {
      const int64_t end = begin + kSlice < inputs ? begin + kSlice : inputs;
      multiply_rows<kTileRows<T>, true>(first, x, x_stride, w + p * panel_size, panel_size, count, begin, end,
                                        sums + p * kPanel, kAhead / static_cast<int64_t>(sizeof(T)));
      for (int64_t row = first; row < rows; row += first) {
        const int64_t ahead = row == first ? slice.from(begin) : 0;
        const int64_t some = rows - row < first ? rows - row : first;
        float* own = sums + row * kGroup * kPanel + p * kPanel;
        if (ahead != 0) {
          multiply_and_fetch<kTileRows<T>>(some, x + row * x_stride, x_stride, w + p * panel_size, panel_size,
                                           count, begin, end, own, ahead);
        } else {
          multiply_rows<kTileRows<T>, false>(some, x + row * x_stride, x_stride, w + p * panel_size, panel_size,
                                             count, begin, end, own);
        }
      }
    }
  }
}

// Rows from `x` on by some panels; `next`: see LinearArgs.
template <class T, class X>
__attribute__((noinline)) void multiply_task(const X* x, int64_t x_stride, int64_t rows, const T* w,
                                             int64_t panel_size, int64_t panels, int64_t inputs, float* sums,
                                             int64_t next) {
  if constexpr (kMaxStreamRows<T, X> > 0) {
    if (rows > kTileRows<T> && rows <= kMaxStreamRows<T, X>) {
      return multiply_stream<kMaxStreamRows<T, X>>(rows, x, x_stride, w, panel_size, panels, inputs, sums);
    }
  }
  const bool are_few = rows >= kMinPrefetchRows && rows <= kMaxPrefetchRows;
  if (are_few) return multiply_few(x, x_stride, rows, w, panel_size, panels, inputs, sums, next);
  // Tiles as even as possible: 14 rows in tiles of at most 6 are 5 + 5 + 4, not 6 + 6 + 2.
  constexpr int kRows = kManyRowsTile<T, X>;
  const int64_t tiles = (rows + kRows - 1) / kRows;
  const NextSlice slice{inputs, next};
  for (int64_t begin = 0; begin == 0 || begin < inputs; begin += kSlice) {
    const int64_t end = begin + kSlice < inputs ? begin + kSlice : inputs;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
      // the first tile prefetches what it reads, the second one the weights after these
      int64_t ahead = 0;
      if (tiles > 1 && tile == 0) ahead = kFarAhead / static_cast<int64_t>(sizeof(T));
      if (tile == 1) ahead = slice.from(begin);
      float* own = sums + first * kGroup * kPanel;
      if (ahead != 0) {
        multiply_and_fetch<kRows>(last - first, x + first * x_stride, x_stride, w, panel_size, panels, begin,
                                  end, own, ahead);
      } else {
        multiply_rows<kRows, false>(last - first, x + first * x_stride, x_stride, w, panel_size, panels, begin,
                                    end, own);
      }
    }
  }
}

// A product rounded to T.
template <class T>
inline VecF rounded(VecF x) {
  alignas(64) T memory[kLanes];
  store(memory, x);
  return load(memory);
}
#ifdef __AVX512BF16__
template <>
inline VecF rounded<bfloat16>(VecF x) {
  const auto halves = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
#endif
template <>
inline VecF rounded<float>(VecF x) {
  return x;
}

// Lanes of a gated result, of which `column` is the first. The products are rounded to T, so that the result
// equals that of the two separate kernels.
template <class T, class Activation>
inline VecF gated_lanes(const LinearArgs& a, const Activation& activation, VecF gate, VecF up, int64_t column) {
  if (a.bias != nullptr) {
    const T* bias = static_cast<const T*>(a.bias) + column;
    gate = gate + load(bias);
    up = up + load(bias + a.out_features / 2);
  }
  return activation(rounded<T>(gate)) * rounded<T>(up);
}

// A row of the gated result.
template <class T, class Activation>
inline void write_gated_row(const LinearArgs& a, const Activation& activation, const float* gates,
                            const float* ups, int64_t row, int64_t column, int64_t columns) {
  T* out = static_cast<T*>(a.out) + row * a.out_stride + column;
  // Whole panels: `columns` is a multiple of the lanes.
  for (int64_t i = 0; i < columns; i += kLanes) {
    store(out + i, gated_lanes<T>(a, activation, load(gates + i), load(ups + i), column + i));
  }
}

// Rows [row, row + rows) by panels [panel, panel + panels); if gated, also by the corresponding panels of the
// second half.
template <class T, class X>
void run_task(const LinearArgs& a, const X* x, int64_t x_stride, int64_t row, int64_t rows, int64_t panel,
              int64_t panels) {
  alignas(64) float sums[kTaskRows * kGroup * kPanel];
  constexpr bool kPairs = is_same<T, bfloat16>;
  const int64_t padded = kPairs ? (a.in_features + 1) / 2 * 2 : a.in_features;
  const int64_t panel_size = padded * kPanel;
  const T* w = static_cast<const T*>(a.packed) + panel * panel_size;
  const int64_t ups_behind = a.is_gated ? a.out_features / 2 * padded : 0;
  multiply_task(x + row * x_stride, x_stride, rows, w, panel_size, panels, padded, sums,
                a.is_gated ? ups_behind : a.next);
  const int64_t column = panel * kPanel;
  if (a.is_gated) {
    float* ups = sums + rows * kGroup * kPanel;
    multiply_task(x + row * x_stride, x_stride, rows, w + ups_behind, panel_size, panels, padded, ups,
                  a.next == 0 ? 0 : a.next - ups_behind);
    with_gate<T>(a.gate, [&](auto activation) {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = r * kGroup * kPanel;
        write_gated_row<T>(a, activation, sums + at, ups + at, row + r, column, panels * kPanel);
      }
    });
    return;
  }
  const int64_t columns = panels * kPanel < a.out_features - column ? panels * kPanel : a.out_features - column;
  for (int64_t r = 0; r < rows; ++r) write_row<T>(a, sums + r * kGroup * kPanel, row + r, column, columns);
}

// The same by any number of panels; `after`: the panel that the task's thread probably reads next, or 0.
template <class T, class X>
void run_wide_task(LinearArgs a, const X* x, int64_t x_stride, int64_t row, int64_t rows, int64_t panel,
                   int64_t panels, int64_t after) {
  const int64_t last = panel + panels;
  const int64_t panel_size = (is_same<T, bfloat16> ? (a.in_features + 1) / 2 * 2 : a.in_features) * kPanel;
  for (; panel < last; panel += kGroup) {
    const int64_t next = panel + kGroup < last ? panel + kGroup : after;
    a.next = next == 0 ? 0 : (next - panel) * panel_size;
    run_task<T>(a, x, x_stride, row, rows, panel, std::min(kGroup, last - panel));
  }
}

// Copies row t of x into the workspace as X, padded to an even length.
template <class T, class X>
inline void widen_row(const LinearArgs& a, int64_t t, X* to, int64_t padded) {
  const T* from = static_cast<const T*>(a.x) + t * a.x_stride;
  for_lanes(
      a.in_features, [&](int64_t i) { store(to + i, load(from + i)); },
      [&](int64_t i, int rest) { store_n(to + i, load_n(from + i, rest), rest); });
  if (padded > a.in_features) to[a.in_features] = X{};
}

}  // namespace
}  // namespace ascend_vllm

#include "cpu/kernels/gemm_tiles.h"

#endif
