// Pieces of products with weights in 8 or 4 bits and with inputs in 8 bits, see ops/quantized_gemm.py.
//
// Weights are read as 32-bit words of a panel's 16 outputs; a shift and a mask give 16-bit pairs of inputs, in
// registers and for about a dozen rows at a time. Whole numbers are multiplied as integers: a row of 16-bit
// floats is rounded to 16-bit multiples of a scale per block of at most 128 inputs, so a block's sum is exact
// in 32 bits, and sums of blocks are added in float32 in the order of the inputs: a row's result does not
// depend on the other rows. 8-bit inputs have one block, of all inputs. fp8 weights
// are multiplied as bfloat16 where there are instructions for that; they and inputs in float32 are otherwise
// multiplied in float32, by the tiles of gemm_tasks.h, in slices of unpacked weights. With AMX, rows of
// bfloat16 are multiplied as quant_amx.h says, and those of 8 bits as quant_amx_int8.h does.
#pragma once

#include <algorithm>

#include "cpu/kernels/gemm_tasks.h"

namespace ascend_vllm {

enum class Code : int32_t { kUint4, kUint8, kFloat8E4m3 };

inline int bits_of(Code code) { return code == Code::kUint4 ? 4 : 8; }

struct QuantizedLinearArgs {
  DType dtype;           // of x and the result
  const void* x;         // row t starts at t * x_stride elements
  const int32_t* order;  // [in_features], columns of x, or null
  const uint32_t* codes;
  const void* scales;    // [panels, groups, 16] of scale_dtype
  const uint8_t* zeros;  // [panels, groups, 16], or null for the middle of the code
  const float* bias;     // [out_features] or null
  void* out;             // [rows, out_features], or half as wide if it is gated; contiguous
  char* workspace;       // QuantizedInputs(args).bytes
  int64_t rows, x_stride, in_features, out_features, group_size;
  DType scale_dtype;
  Code code;
  bool is_gated;  // out_features is a multiple of 32 then
  Gate gate;
  bool rounds_inputs;  // to 8 bits, in blocks of 32; not with float8_e4m3
};

// Rows as the products read them: offsets into the workspace, and sizes.
struct QuantizedInputs {
  static constexpr int64_t kBlock = 128;        // maximum inputs of a block
  static constexpr int64_t kRoundedBlock = 32;  // the same of inputs that are rounded to 8 bits

  static constexpr int64_t kStep = 32;  // bfloat16 inputs of weights that are widened at a time

  bool are_integers;       // 16-bit integers, or else floats or bfloat16 numbers
  int64_t stride;          // elements from row to row
  int64_t tile_stride;     // the same of bfloat16 numbers, with each block of inputs padded to whole steps
  int64_t blocks;          // of a row
  int64_t scales, totals;  // float and int32 [rows, blocks]: scales, and sums of the integers
  int64_t bytes;

  // inlined, or all callers would share the code of one instruction set
  __attribute__((always_inline)) explicit QuantizedInputs(const QuantizedLinearArgs& a) {
    are_integers = a.rounds_inputs || (a.dtype != DType::kFloat32 && a.code != Code::kFloat8E4m3);
    const int64_t block = a.rounds_inputs ? kRoundedBlock : kBlock;
    // an odd number of cache lines, or else rows of some sizes would share few sets of the cache
    stride = (a.in_features + 31) / 32 * 32;
    if (stride % 64 == 0) stride += 32;
    const int64_t groups = (a.in_features + a.group_size - 1) / a.group_size;
    const int64_t last = a.in_features - (groups - 1) * a.group_size;
    blocks = groups == 0 ? 0 : (groups - 1) * ((a.group_size + block - 1) / block) + (last + block - 1) / block;
    scales = (are_integers ? 2 : 4) * stride * a.rows;
    totals = scales + (are_integers ? 4 * blocks * a.rows : 0);
    const int64_t steps =
        groups == 0 ? 0 : (groups - 1) * ((a.group_size + kStep - 1) / kStep) + (last + kStep - 1) / kStep;
    tile_stride = (steps | 1) * kStep;
    bytes = std::max(totals + (are_integers ? 4 * blocks * a.rows : 0), 2 * tile_stride * a.rows);
  }
};

struct Int8LinearArgs {
  DType dtype;      // of the result
  const int8_t* q;  // [rows, in_features]
  const float* q_scales;
  const int32_t* q_offsets;  // [rows] or null
  const uint32_t* codes;
  const float* scales;  // [panels, 16]
  const int32_t* sums;  // [out_features]; if q_offsets is not null
  const float* bias;    // as above
  void* out;
  char* workspace;  // int8_workspace(rows, in_features) bytes
  int64_t rows, in_features, out_features;
  bool is_gated;
  Gate gate;
};

#ifndef ASCEND_VLLM_ISA
inline QuantizedProduct product_of(const QuantizedLinearArgs& args) {
  if (args.code == Code::kFloat8E4m3) return kFloat8Weights;
  if (args.code == Code::kUint4) return args.rounds_inputs ? kUint4Rounded : kUint4Weights;
  return args.rounds_inputs ? kUint8Rounded : kUint8Weights;
}
#endif

inline int64_t int8_stride(int64_t in_features) {
  const int64_t stride = (in_features + 63) / 64 * 64;
  return stride % 128 == 0 ? stride + 64 : stride;
}
// At most two bytes per input, and the rows' sums.
inline int64_t int8_workspace(int64_t rows, int64_t in_features) {
  return rows * (2 * int8_stride(in_features) + 4);
}

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/isa/integers.h"
#include "cpu/kernels/quant_tiles.h"
// after the former
#include "cpu/kernels/quant_widen.h"
// after the former
#include "cpu/kernels/quant_amx.h"
// after the former
#include "cpu/kernels/quant_amx_int8.h"

namespace ascend_vllm {
namespace {

constexpr PieceSizes kVectorPieces{kTaskRows, kGroup, kTaskRows / 2, kGroup};
#ifdef __AMX_BF16__
template <class T>
constexpr PieceSizes kQuantizedPieces = is_same<T, bfloat16> ? kTilePieces : kVectorPieces;
constexpr PieceSizes kInt8Pieces = kTilePieces;
#else
template <class T>
constexpr PieceSizes kQuantizedPieces = kVectorPieces;
constexpr PieceSizes kInt8Pieces = kVectorPieces;
#endif

// Writes rows of sums, [rows, stride], to the result; `ups` of the second half if it is gated.
template <class T>
void write_sums(const LinearArgs& out, const float* bias, float* sums, float* ups, int64_t stride, int64_t row,
                int64_t rows, int64_t panel, int64_t panels) {
  const int64_t column = panel * kPanel, width = out.is_gated ? out.out_features / 2 : out.out_features;
  const int64_t columns = std::min(panels * kPanel, width - column);
  const auto add_bias = [&](float* to, const float* from) {
    for_lanes(
        columns, [&](int64_t i) { store(to + i, load(to + i) + load(from + i)); },
        [&](int64_t i, int rest) { store_n(to + i, load_n(to + i, rest) + load_n(from + i, rest), rest); });
  };
  for (int64_t r = 0; r < rows; ++r) {
    float* own = sums + r * stride;
    if (bias != nullptr) add_bias(own, bias + column);
    if (!out.is_gated) {
      write_row<T>(out, own, row + r, column, columns);
      continue;
    }
    float* up = ups + r * stride;
    if (bias != nullptr) add_bias(up, bias + width + column);
    with_gate<T>(out.gate, [&](auto activation) {
      write_gated_row<T>(out, activation, own, up, row + r, column, columns);
    });
  }
}

template <class Args>
LinearArgs result_of(const Args& a) {
  LinearArgs out{};
  out.dtype = a.dtype;
  out.out = a.out;
  out.rows = a.rows;
  out.out_features = a.out_features;
  out.is_gated = a.is_gated;
  out.gate = a.gate;
  out.out_stride = a.is_gated ? a.out_features / 2 : a.out_features;
  return out;
}

// Some rows' products with `count` panels from `first` on; `Product` computes the sums.
template <class T, class Args, class Product>
void run_panels(const Args& a, const Product& product, int64_t row, int64_t rows, int64_t first,
                int64_t count) {
  constexpr PieceSizes kSizes = Product::kSizes;
  const LinearArgs out = result_of(a);
  const int64_t half = (a.out_features + kPanel - 1) / kPanel / 2;
  const int64_t most = kSizes.most_panels(a.is_gated);
  alignas(64) float sums[kSizes.sums()];
  float* ups = sums + rows * kSizes.stride();
  for (int64_t panel = first; panel < first + count; panel += most) {
    const int64_t own = std::min(most, first + count - panel);
    const int64_t next = panel + own;
    product.multiply(row, rows, panel, own, a.is_gated ? panel + half : next, sums);
    if (a.is_gated) product.multiply(row, rows, panel + half, own, next, ups);
    write_sums<T>(out, a.bias, sums, ups, kSizes.stride(), row, rows, panel, own);
  }
}

// A product in pieces: rows are prepared one by one, and then multiplied by some panels at a time. A piece has
// at most as many rows as kSizes says.
template <class T>
class QuantizedTask {
 public:
  static constexpr PieceSizes kSizes = kQuantizedPieces<T>;

  explicit QuantizedTask(const QuantizedLinearArgs& args) : a_(args), inputs_(args), weight_(args) {}

  // Writes a row of x to the workspace in the form that products read.
  void prepare(const T* x, int64_t row) const {
    if (kHasByteDots && a_.rounds_inputs) {
      int8_t* to = reinterpret_cast<int8_t*>(a_.workspace) + row * inputs_.stride;
      round_row(a_, weight_, x, to, inputs_.stride, scales() + row * inputs_.blocks,
                totals() + row * inputs_.blocks);
      return arrange_bytes(weight_.bits, to, inputs_.stride);
    }
#ifdef __AMX_BF16__
    if constexpr (is_same<T, bfloat16>) {
      if (!a_.rounds_inputs) return copy_steps(a_, weight_, x, bfloat16s() + row * inputs_.tile_stride);
    }
#endif
    if (inputs_.are_integers) {
      round_row(a_, weight_, x, integers() + row * inputs_.stride, inputs_.stride,
                scales() + row * inputs_.blocks, totals() + row * inputs_.blocks);
      return;
    }
#ifdef __AVX512BF16__
    if constexpr (is_same<T, bfloat16>) {
      return widen_ordered(a_, x, bfloat16s() + row * inputs_.stride, inputs_.stride);
    }
#endif
    widen_ordered(a_, x, reinterpret_cast<float*>(a_.workspace) + row * inputs_.stride, inputs_.stride);
  }

  // Multiplies prepared rows by panels and writes the result; if it is gated, by those of both halves.
  void run(int64_t row, int64_t rows, int64_t panel, int64_t panels) const {
    run_panels<T>(a_, *this, row, rows, panel, panels);
  }

  void multiply(int64_t row, int64_t rows, int64_t panel, int64_t panels, int64_t, float* sums) const {
#ifdef ASCEND_VLLM_BYTE_DOTS
    if (a_.rounds_inputs) {
      const int8_t* x = reinterpret_cast<const int8_t*>(a_.workspace) + row * inputs_.stride;
      const ByteRows own{reinterpret_cast<const int32_t*>(x), inputs_.stride / 4,
                         scales() + row * inputs_.blocks, totals() + row * inputs_.blocks, inputs_.blocks};
      return multiply_rounded(weight_, own, rows, panel, panels, kSizes.stride(), sums);
    }
#endif
#ifdef __AMX_BF16__
    if constexpr (is_same<T, bfloat16>) {
      return multiply_widened(weight_, bfloat16s() + row * inputs_.tile_stride, inputs_.tile_stride, rows,
                              panel, panels, sums);
    }
#endif
    if (inputs_.are_integers) {
      const IntegerRows own{reinterpret_cast<const int32_t*>(integers() + row * inputs_.stride),
                            inputs_.stride / 2, scales() + row * inputs_.blocks,
                            totals() + row * inputs_.blocks, inputs_.blocks};
      return multiply_integers(weight_, own, rows, panel, panels, sums);
    }
#ifdef __AVX512BF16__
    if constexpr (is_same<T, bfloat16>) {
      const bfloat16* x = bfloat16s() + row * inputs_.stride;
      return multiply_float8(weight_, reinterpret_cast<const int32_t*>(x), inputs_.stride / 2, rows, panel,
                             panels, sums);
    }
#endif
    const float* x = reinterpret_cast<const float*>(a_.workspace) + row * inputs_.stride;
    multiply_floats(weight_, x, inputs_.stride, rows, panel, panels, sums);
  }

 private:
  bfloat16* bfloat16s() const { return reinterpret_cast<bfloat16*>(a_.workspace); }
  int16_t* integers() const { return reinterpret_cast<int16_t*>(a_.workspace); }
  float* scales() const { return reinterpret_cast<float*>(a_.workspace + inputs_.scales); }
  int32_t* totals() const { return reinterpret_cast<int32_t*>(a_.workspace + inputs_.totals); }

  const QuantizedLinearArgs& a_;
  const QuantizedInputs inputs_;
  const QuantizedWeight weight_;
};

// The same of 8-bit inputs.
template <class T>
class Int8Task {
 public:
  static constexpr PieceSizes kSizes = kInt8Pieces;

  explicit Int8Task(const Int8LinearArgs& args) : a_(args), stride_(int8_stride(args.in_features)) {}

  void prepare(const int8_t* q, int64_t row) const {
    totals()[row] = Int8Dot::arrange(q, a_.in_features, inputs() + row * stride_, stride_);
  }

  void run(int64_t row, int64_t rows, int64_t panel, int64_t panels) const {
    run_panels<T>(a_, *this, row, rows, panel, panels);
  }

  // next: the panel that probably follows those.
  void multiply(int64_t row, int64_t rows, int64_t panel, int64_t panels, [[maybe_unused]] int64_t next,
                float* sums) const {
    constexpr int64_t kSize = sizeof(Int8Dot::Input);
    const int32_t* x = reinterpret_cast<const int32_t*>(inputs() + row * stride_);
#ifdef __AMX_BF16__
    multiply_int8_in_tiles(a_, x, stride_ * kSize / 4, totals() + row, row, rows, panel, panels, sums);
#else
    multiply_int8(a_, x, stride_ * kSize / 4, totals() + row, row, rows, panel, panels, next, sums);
#endif
  }

 private:
  Int8Dot::Input* inputs() const { return reinterpret_cast<Int8Dot::Input*>(a_.workspace); }
  int32_t* totals() const { return reinterpret_cast<int32_t*>(a_.workspace + 2 * stride_ * a_.rows); }

  const Int8LinearArgs& a_;
  const int64_t stride_;
};

}  // namespace

}  // namespace ascend_vllm

#endif
