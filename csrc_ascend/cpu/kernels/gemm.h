// x @ weight.T + bias by the products of gemm_tasks.h.
#pragma once

#include "cpu/kernels/gemm_tasks.h"

namespace ascend_vllm {

#ifndef ASCEND_VLLM_ISA
inline int choice_for(const LinearArgs& args) { return choice_of(args.dtype, class_of(args.rows)); }
#endif

ASCEND_VLLM_KERNEL(packed_linear, LinearArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

namespace ascend_vllm {
namespace {

template <class T>
void packed_linear(const LinearArgs& a) {
#ifdef __AMX_BF16__
  if constexpr (is_same<T, bfloat16>) return multiply_in_tiles(a);
#endif
  using X = typename InputOf<T>::type;
  if (a.rows == 0 || a.out_features == 0) return;
  const int64_t padded = (a.in_features + 1) / 2 * 2;
  const X* x = static_cast<const X*>(a.x);
  int64_t x_stride = a.x_stride;
  X* workspace = nullptr;
  if (!is_same<T, X> || (is_same<T, bfloat16> && padded != a.in_features)) {
    x = workspace = static_cast<X*>(a.workspace);
    x_stride = padded;
  }
  // if gated, only those of the first half, each of which implies one of the second
  const int64_t panels = a.is_gated ? a.out_features / 2 / kPanel : (a.out_features + kPanel - 1) / kPanel;
  const int64_t most_rows = a.is_gated ? kTaskRows / 2 : kTaskRows;
  int64_t row_blocks = (a.rows + most_rows - 1) / most_rows;
  int64_t group = a.rows <= kStreamedRows ? kStreamPanels : kGroup;
  // of few rows it takes as long as reading the weights: four times as long as their multiplication
  const int threads = threads_for(a.rows * a.in_features * a.out_features / 2);
  // fewer rows and then panels per task if there would be too few tasks to balance the threads
  const auto are_too_few = [&] { return row_blocks * ((panels + group - 1) / group) < 4 * threads; };
  if (are_too_few()) row_blocks = (2 * a.rows + most_rows - 1) / most_rows;
  while (group > 1 && are_too_few()) group /= 2;
  const int64_t groups = (panels + group - 1) / group;
  const auto task = [&](int64_t index) {
    const int64_t part = part_in_turn(index, row_blocks * groups, threads);
    const int64_t block = part / groups, panel = part % groups * group;
    const int64_t row = a.rows * block / row_blocks, end = a.rows * (block + 1) / row_blocks;
    run_wide_task<T>(a, x, x_stride, row, end - row, panel, std::min(group, panels - panel),
                     row_blocks == 1 ? panel + group : 0);
  };
  const auto widen = [&](int64_t t) { widen_row<T>(a, t, workspace + t * padded, padded); };
  // a small input is converted in this thread, since another barrier would cost more, above all on a busy
  // machine
  const bool widen_together = workspace != nullptr && threads > 1 && a.rows * padded > 2 * kMinWorkPerThread;
  if (workspace != nullptr && !widen_together) {
    for (int64_t t = 0; t < a.rows; ++t) widen(t);
  }
  if (threads == 1) {
    for (int64_t i = 0; i < row_blocks * groups; ++i) task(i);
    return;
  }
  if (widen_together) {
    parallel_for(a.rows, padded / 2, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) widen(t);
    });
  }
  run_parts(row_blocks * groups, threads, [&](int64_t index, int64_t) { task(index); });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(packed_linear, LinearArgs) {
  with_dtype(args.dtype, [&](auto tag) { packed_linear<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
