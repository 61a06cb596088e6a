// Products with weights in 8 or 4 bits and with inputs in 8 bits, by the pieces of quant_tasks.h.
//
// The macros __AVX512VNNI__ and __AMX_BF16__ make the build compile this header for those sets, too.
#pragma once

#include "cpu/kernels/quant_tasks.h"
// after the former
#include "cpu/kernels/quant_blocks.h"

namespace ascend_vllm {

#ifndef ASCEND_VLLM_ISA
inline int choice_for(const QuantizedLinearArgs& args) {
  return choice_of(args.dtype, class_of(product_of(args), args.rows));
}
inline int choice_for(const Int8LinearArgs& args) {
  return choice_of(args.dtype, class_of(kInt8ByInt8, args.rows));
}
#endif

ASCEND_VLLM_KERNEL(quantized_linear, QuantizedLinearArgs)
ASCEND_VLLM_KERNEL(int8_linear, Int8LinearArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

namespace ascend_vllm {
namespace {

// Panels that quant_amx.h and quant_amx_int8.h multiply together by so many rows; 0 without tiles.
inline int64_t panels_together([[maybe_unused]] int64_t rows) {
#ifdef __AMX_BF16__
  return rows <= kTileHeight ? 4 : 2;
#else
  return 0;
#endif
}

// A product's rows and panels, in tasks: task(row, rows, panel, panels).
template <class Task>
void run_quantized(int64_t rows, int64_t panels, int64_t work, int64_t most_rows, int64_t most_panels,
                   const Task& task) {
  int64_t row_blocks = (rows + most_rows - 1) / most_rows, group = most_panels;
  const int threads = threads_for(work);
  // fewer panels per task if there would be too few tasks to balance the threads; those that tiles multiply
  // together only if there would be hardly more tasks than threads
  const int64_t together = panels_together(rows);
  while (group > 1 && row_blocks * ((panels + group - 1) / group) < (group > together ? 8 : 2) * threads) {
    group /= 2;
  }
  const int64_t groups = (panels + group - 1) / group;
  const auto run = [&](int64_t index) {
    const int64_t part = part_in_turn(index, row_blocks * groups, threads);
    const int64_t block = part / groups, panel = part % groups * group;
    const int64_t row = rows * block / row_blocks, end = rows * (block + 1) / row_blocks;
    task(row, end - row, panel, std::min(group, panels - panel));
  };
  if (threads == 1) {
    for (int64_t i = 0; i < row_blocks * groups; ++i) run(i);
  } else {
    run_parts(row_blocks * groups, threads, [&](int64_t index, int64_t) { run(index); });
  }
}

// Calls prepare(row) for each, in all threads if that is much work.
template <class Prepare>
void prepare_rows(int64_t rows, int64_t inputs, const Prepare& prepare) {
  parallel_for(rows, 2 * inputs, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) prepare(t);
  });
}

// All pieces of a product.
template <class Args, class Product>
void run_product(const Args& a, const Product& product) {
  const int64_t all_panels = (a.out_features + kPanel - 1) / kPanel;
  run_quantized(
      a.rows, a.is_gated ? all_panels / 2 : all_panels, a.rows * a.in_features * a.out_features / 8,
      Product::kSizes.most_rows(a.is_gated),
      a.rows <= std::max(kStreamedRows, kFewQuantizedRows) ? kStreamPanels
                                                           : Product::kSizes.most_panels(a.is_gated),
      [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) { product.run(row, rows, panel, panels); });
}

template <class T>
void quantized_linear(const QuantizedLinearArgs& a) {
  if (a.rows == 0 || a.out_features == 0) return;
#ifdef __AMX_BF16__
  // the ends of short groups leave no time to compute gates
  const bool are_long = std::min(a.group_size, a.in_features) >= kMinGatedGroup;
  if (is_same<T, bfloat16> && a.rows >= kMinBlockedRows && !a.rounds_inputs && (are_long || !a.is_gated)) {
    return with_code(a.code, [&]<Code kCode>() { multiply_blocked<CodeTiles<kCode>>(a); });
  }
#endif
  const QuantizedTask<T> product(a);
  prepare_rows(a.rows, a.in_features,
               [&](int64_t t) { product.prepare(static_cast<const T*>(a.x) + t * a.x_stride, t); });
  run_product(a, product);
}

template <class T>
void int8_linear(const Int8LinearArgs& a) {
  if (a.rows == 0 || a.out_features == 0) return;
#ifdef __AMX_BF16__
  if (a.rows >= kMinBlockedRows) return multiply_blocked<ByteTiles<T>>(a);
#endif
  const Int8Task<T> product(a);
  prepare_rows(a.rows, a.in_features, [&](int64_t t) { product.prepare(a.q + t * a.in_features, t); });
  run_product(a, product);
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
