// Products with weights in 8 or 4 bits and with inputs in 8 bits, see ops/quantized_gemm.py.
//
// Weights are read as 32-bit words of a panel's 16 outputs; a shift and a mask give 16-bit pairs of inputs, in
// registers and for about a dozen rows at a time. Whole numbers are multiplied as integers: a row of 16-bit
// floats is rounded to 16-bit multiples of a scale per block of at most 128 inputs, so a block's sum is exact
// in 32 bits, and sums of blocks are added in float32 in the order of the inputs: a row's result does not
// depend on the other rows. 8-bit inputs have one block, of all inputs. fp8 weights
// are multiplied as bfloat16 where there are instructions for that; they and inputs in float32 are otherwise
// multiplied in float32, by the tiles of gemm_tasks.h, in slices of unpacked weights.
//
// The macro __AVX512VNNI__ makes the build compile this header for that set, too.
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

ASCEND_VLLM_KERNEL(quantized_linear, QuantizedLinearArgs)

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

ASCEND_VLLM_KERNEL(int8_linear, Int8LinearArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/isa/integers.h"
#include "cpu/kernels/quant_tiles.h"

namespace ascend_vllm {
namespace {

// A product's rows and panels, in tasks: task(row, rows, panel, panels).
template <class Task>
void run_quantized(int64_t rows, int64_t panels, int64_t work, int64_t most_rows, int64_t most_panels,
                   const Task& task) {
  int64_t row_blocks = (rows + most_rows - 1) / most_rows, group = most_panels;
  const int threads = threads_for(work);
  // fewer panels per task if there would be too few tasks to balance the threads
  while (group > 1 && row_blocks * ((panels + group - 1) / group) < 8 * threads) group /= 2;
  const int64_t groups = (panels + group - 1) / group;
  const auto run = [&](int64_t index) {
    const int64_t block = index / groups, panel = index % groups * group;
    const int64_t row = rows * block / row_blocks, end = rows * (block + 1) / row_blocks;
    task(row, end - row, panel, std::min(group, panels - panel));
  };
  if (threads == 1) {
    for (int64_t i = 0; i < row_blocks * groups; ++i) run(i);
  } else {
    run_parts(row_blocks * groups, threads, [&](int64_t index, int64_t) { run(index); });
  }
}

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

// The products of a call; `Rows` computes the sums of some rows by some panels.
template <class T, class Args, class Rows>
void run_product(const Args& a, const Rows& multiply) {
  const LinearArgs out = result_of(a);
  const int64_t all_panels = (a.out_features + kPanel - 1) / kPanel;
  const int64_t panels = a.is_gated ? all_panels / 2 : all_panels;
  const int64_t most_rows = a.is_gated ? kTaskRows / 2 : kTaskRows;
  run_quantized(a.rows, panels, a.rows * a.in_features * a.out_features / 8, most_rows,
                a.rows <= kFewQuantizedRows ? kFewRowsPanels : kGroup,
                [&](int64_t row, int64_t rows, int64_t first, int64_t count) {
                  alignas(64) float sums[kTaskRows * kGroup * kPanel];
                  float* ups = sums + rows * kGroup * kPanel;
                  for (int64_t panel = first; panel < first + count; panel += kGroup) {
                    const int64_t own = std::min(kGroup, first + count - panel);
                    multiply(row, rows, panel, own, sums);
                    if (a.is_gated) multiply(row, rows, panel + panels, own, ups);
                    write_sums<T>(out, a.bias, sums, ups, row, rows, panel, own);
                  }
                });
}

// Calls prepare(row) for each, in all threads if that is much work.
template <class Prepare>
void prepare_rows(int64_t rows, int64_t inputs, const Prepare& prepare) {
  if (rows * inputs <= 2 * kMinWorkPerThread) {
    for (int64_t t = 0; t < rows; ++t) prepare(t);
    return;
  }
  parallel_for(rows, inputs, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) prepare(t);
  });
}

template <class T>
void quantized_linear(const QuantizedLinearArgs& a) {
  if (a.rows == 0 || a.out_features == 0) return;
  const QuantizedInputs inputs(a);
  const QuantizedWeight weight(a);
  if (inputs.are_integers) {
    int16_t* x = reinterpret_cast<int16_t*>(a.workspace);
    float* scales = reinterpret_cast<float*>(a.workspace + inputs.scales);
    int32_t* totals = reinterpret_cast<int32_t*>(a.workspace + inputs.totals);
    prepare_rows(a.rows, a.in_features, [&](int64_t t) {
      round_row<T>(a, weight, t, x + t * inputs.stride, inputs.stride, scales + t * inputs.blocks,
                   totals + t * inputs.blocks);
    });
    run_product<T>(a, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) {
      const IntegerRows own{reinterpret_cast<const int32_t*>(x + row * inputs.stride), inputs.stride / 2,
                            scales + row * inputs.blocks, totals + row * inputs.blocks, inputs.blocks};
      multiply_integers(weight, own, rows, panel, panels, sums);
    });
#ifdef __AVX512BF16__
  } else if (is_same<T, bfloat16>) {
    bfloat16* x = reinterpret_cast<bfloat16*>(a.workspace);
    prepare_rows(a.rows, a.in_features,
                 [&](int64_t t) { widen_ordered<T>(a, t, x + t * inputs.stride, inputs.stride); });
    run_product<T>(a, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) {
      multiply_float8(weight, reinterpret_cast<const int32_t*>(x + row * inputs.stride), inputs.stride / 2,
                      rows, panel, panels, sums);
    });
#endif
  } else {
    float* x = reinterpret_cast<float*>(a.workspace);
    prepare_rows(a.rows, a.in_features,
                 [&](int64_t t) { widen_ordered<T>(a, t, x + t * inputs.stride, inputs.stride); });
    run_product<T>(a, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) {
      multiply_floats(weight, x + row * inputs.stride, inputs.stride, rows, panel, panels, sums);
    });
  }
}

template <class T>
void int8_linear(const Int8LinearArgs& a) {
  if (a.rows == 0 || a.out_features == 0) return;
  const int64_t stride = int8_stride(a.in_features);
  using X = Int8Dot::Input;
  X* x = reinterpret_cast<X*>(a.workspace);
  int32_t* totals = reinterpret_cast<int32_t*>(a.workspace + 2 * stride * a.rows);
  prepare_rows(a.rows, a.in_features, [&](int64_t t) {
    const int8_t* q = a.q + t * a.in_features;
    totals[t] = Int8Dot::arrange(q, a.in_features, x + t * stride, stride);
  });
  run_product<T>(a, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) {
    multiply_int8(a, reinterpret_cast<const int32_t*>(x + row * stride),
                  stride * static_cast<int64_t>(sizeof(X)) / 4, totals + row, row, rows, panel, panels, sums);
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(quantized_linear, QuantizedLinearArgs) {
  with_dtype(args.dtype, [&](auto tag) { quantized_linear<decltype(tag)>(args); });
}

ASCEND_VLLM_DEFINE_KERNEL(int8_linear, Int8LinearArgs) {
  with_dtype(args.dtype, [&](auto tag) { int8_linear<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
