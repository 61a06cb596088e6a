// Pieces of products with weights in 8 or 4 bits and with inputs in 8 bits, see ops/quantized_gemm.py.
//
// Weights are read as 32-bit words of a panel's 16 outputs; a shift and a mask give 16-bit pairs of inputs, in
// registers and for about a dozen rows at a time. Whole numbers are multiplied as integers: a row of 16-bit
// floats is rounded to 16-bit multiples of a scale per block of at most 128 inputs, so a block's sum is exact
// in 32 bits, and sums of blocks are added in float32 in the order of the inputs: a row's result does not
// depend on the other rows. 8-bit inputs have one block, of all inputs. fp8 weights
// are multiplied as bfloat16 where there are instructions for that; they and inputs in float32 are otherwise
// multiplied in float32, by the tiles of gemm_tasks.h, in slices of unpacked weights.
#pragma once

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
};

// Rows as the products read them: offsets into the workspace, and sizes.
struct QuantizedInputs {
  static constexpr int64_t kBlock = 128;  // maximum inputs of a block

  bool are_integers;       // 16-bit integers, or else floats
  int64_t stride;          // elements from row to row
  int64_t blocks;          // of a row
  int64_t scales, totals;  // float and int32 [rows, blocks]: scales, and sums of the integers
  int64_t bytes;

  // inlined, or all callers would share the code of one instruction set
  __attribute__((always_inline)) explicit QuantizedInputs(const QuantizedLinearArgs& a) {
    are_integers = a.dtype != DType::kFloat32 && a.code != Code::kFloat8E4m3;
    // an odd number of cache lines, or else rows of some sizes would share few sets of the cache
    stride = (a.in_features + 31) / 32 * 32;
    if (stride % 64 == 0) stride += 32;
    const int64_t groups = (a.in_features + a.group_size - 1) / a.group_size;
    const int64_t last = a.in_features - (groups - 1) * a.group_size;
    blocks =
        groups == 0 ? 0 : (groups - 1) * ((a.group_size + kBlock - 1) / kBlock) + (last + kBlock - 1) / kBlock;
    scales = (are_integers ? 2 : 4) * stride * a.rows;
    totals = scales + (are_integers ? 4 * blocks * a.rows : 0);
    bytes = totals + (are_integers ? 4 * blocks * a.rows : 0);
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

namespace ascend_vllm {
namespace {

// Writes rows of sums, [rows, kGroup * 16], to the result; `ups` of the second half if it is gated.
template <class T>
void write_sums(const LinearArgs& out, const float* bias, float* sums, float* ups, int64_t row, int64_t rows,
                int64_t panel, int64_t panels) {
  const int64_t column = panel * kPanel, width = out.is_gated ? out.out_features / 2 : out.out_features;
  const int64_t columns = std::min(panels * kPanel, width - column);
  const auto add_bias = [&](float* to, const float* from) {
    for_lanes(
        columns, [&](int64_t i) { store(to + i, load(to + i) + load(from + i)); },
        [&](int64_t i, int rest) { store_n(to + i, load_n(to + i, rest) + load_n(from + i, rest), rest); });
  };
  for (int64_t r = 0; r < rows; ++r) {
    float* own = sums + r * kGroup * kPanel;
    if (bias != nullptr) add_bias(own, bias + column);
    if (!out.is_gated) {
      write_row<T>(out, own, row + r, column, columns);
      continue;
    }
    float* up = ups + r * kGroup * kPanel;
    if (bias != nullptr) add_bias(up, bias + width + column);
    with_gate(out.gate,
              [&](auto activation) { write_gated_row<T>(out, activation, own, up, row + r, column, columns); });
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

// Some rows' products with `count` panels from `first` on; `Product` computes sums of at most kGroup panels.
template <class T, class Args, class Product>
void run_panels(const Args& a, const Product& product, int64_t row, int64_t rows, int64_t first,
                int64_t count) {
  const LinearArgs out = result_of(a);
  const int64_t half = (a.out_features + kPanel - 1) / kPanel / 2;
  alignas(64) float sums[kTaskRows * kGroup * kPanel];
  float* ups = sums + rows * kGroup * kPanel;
  for (int64_t panel = first; panel < first + count; panel += kGroup) {
    const int64_t own = std::min(kGroup, first + count - panel);
    product.multiply(row, rows, panel, own, sums);
    if (a.is_gated) product.multiply(row, rows, panel + half, own, ups);
    write_sums<T>(out, a.bias, sums, ups, row, rows, panel, own);
  }
}

// A product in pieces: rows are prepared one by one, and then multiplied by some panels at a time. A piece has
// at most kTaskRows rows, half as many if it is gated.
template <class T>
class QuantizedTask {
 public:
  explicit QuantizedTask(const QuantizedLinearArgs& args) : a_(args), inputs_(args), weight_(args) {}

  // Writes a row of x to the workspace in the form that products read.
  void prepare(const T* x, int64_t row) const {
    if (inputs_.are_integers) {
      round_row(a_, weight_, x, integers() + row * inputs_.stride, inputs_.stride,
                scales() + row * inputs_.blocks, totals() + row * inputs_.blocks);
      return;
    }
#ifdef __AVX512BF16__
    if constexpr (is_same<T, bfloat16>) {
      return widen_ordered(a_, x, reinterpret_cast<bfloat16*>(a_.workspace) + row * inputs_.stride,
                           inputs_.stride);
    }
#endif
    widen_ordered(a_, x, reinterpret_cast<float*>(a_.workspace) + row * inputs_.stride, inputs_.stride);
  }

  // Multiplies prepared rows by panels and writes the result; if it is gated, by those of both halves.
  void run(int64_t row, int64_t rows, int64_t panel, int64_t panels) const {
    run_panels<T>(a_, *this, row, rows, panel, panels);
  }

  void multiply(int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) const {
    if (inputs_.are_integers) {
      const IntegerRows own{reinterpret_cast<const int32_t*>(integers() + row * inputs_.stride),
                            inputs_.stride / 2, scales() + row * inputs_.blocks,
                            totals() + row * inputs_.blocks, inputs_.blocks};
      return multiply_integers(weight_, own, rows, panel, panels, sums);
    }
#ifdef __AVX512BF16__
    if constexpr (is_same<T, bfloat16>) {
      const bfloat16* x = reinterpret_cast<const bfloat16*>(a_.workspace) + row * inputs_.stride;
      return multiply_float8(weight_, reinterpret_cast<const int32_t*>(x), inputs_.stride / 2, rows, panel,
                             panels, sums);
    }
#endif
    const float* x = reinterpret_cast<const float*>(a_.workspace) + row * inputs_.stride;
    multiply_floats(weight_, x, inputs_.stride, rows, panel, panels, sums);
  }

 private:
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
  explicit Int8Task(const Int8LinearArgs& args) : a_(args), stride_(int8_stride(args.in_features)) {}

  void prepare(const int8_t* q, int64_t row) const {
    totals()[row] = Int8Dot::arrange(q, a_.in_features, inputs() + row * stride_, stride_);
  }

  void run(int64_t row, int64_t rows, int64_t panel, int64_t panels) const {
    run_panels<T>(a_, *this, row, rows, panel, panels);
  }

  void multiply(int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) const {
    constexpr int64_t kSize = sizeof(Int8Dot::Input);
    multiply_int8(a_, reinterpret_cast<const int32_t*>(inputs() + row * stride_), stride_ * kSize / 4,
                  totals() + row, row, rows, panel, panels, sums);
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
