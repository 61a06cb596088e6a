// A product for each attention head, by the tasks of gemm_tasks.h: out[t, n] = x[t, n] @ weight[n].T, followed
// by the elements of x[t, n] that are behind the inputs of the weight.
#pragma once

#include "cpu/kernels/gemm_stream.h"
#include "cpu/kernels/gemm_tasks.h"

namespace ascend_vllm {

struct HeadsLinearArgs {
  DType dtype;
  const void* x;  // token t, head n starts at t * x_token_stride + n * x_head_stride elements
  int64_t x_token_stride, x_head_stride;
  const void* packed;  // the weights of the heads, each as that of packed_linear
  void* out;           // [tokens, heads, out_features + further]
  void* workspace;     // heads * linear_workspace(tokens, in_features) floats
  int64_t tokens, heads, in_features, out_features;
  int64_t further;  // elements of x behind the inputs
};

#ifndef ASCEND_VLLM_ISA
inline int choice_for(const HeadsLinearArgs& args) { return choice_of(args.dtype, class_of(args.tokens)); }
#endif

ASCEND_VLLM_KERNEL(heads_linear, HeadsLinearArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

namespace ascend_vllm {
namespace {

// Prefetches n elements into the L2 cache. Always inline, since g++ 12 removes calls of a function that only
// prefetches.
template <class T>
[[gnu::always_inline]] inline void fetch_panels(const T* from, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i, 0, 2);
}

template <class T>
void heads_linear(const HeadsLinearArgs& a) {
  using X = typename InputOf<T>::type;
  if (a.tokens == 0 || a.heads == 0) return;
#ifdef __AMX_BF16__
  constexpr bool kHasTiles = is_same<T, bfloat16>;
#else
  constexpr bool kHasTiles = false;
#endif
  constexpr bool kPairs = is_same<T, bfloat16>;
  const int64_t padded = (a.in_features + 1) / 2 * 2, weight_inputs = kPairs ? padded : a.in_features;
  const int64_t panel_size = kPanel * weight_inputs;
  const int64_t panels = (a.out_features + kPanel - 1) / kPanel, width = a.out_features + a.further;
  const int threads = threads_for(a.tokens * a.heads * a.in_features * a.out_features / 8);
  LinearArgs linear{};
  linear.dtype = a.dtype;
  linear.x_stride = a.x_token_stride;
  linear.out_stride = a.heads * width;
  linear.in_features = a.in_features;
  linear.out_features = a.out_features;
  const auto of_head = [&](int64_t head) {
    LinearArgs own = linear;
    own.x = static_cast<const T*>(a.x) + head * a.x_head_stride;
    own.packed = static_cast<const T*>(a.packed) + head * panels * panel_size;
    own.out = static_cast<T*>(a.out) + head * width;
    return own;
  };
  const bool widens = !kHasTiles && (!is_same<T, X> || (kPairs && padded != a.in_features));
  if (widens) {
    parallel_for(a.heads * a.tokens, padded / 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        widen_row<T>(of_head(i / a.tokens), i % a.tokens, static_cast<X*>(a.workspace) + i * padded, padded);
      }
    });
  }
  // fewer panels per task if there would be too few tasks to balance the threads
  const int64_t row_blocks = (a.tokens + kTaskRows - 1) / kTaskRows;
  int64_t span = (panels + kGroup - 1) / kGroup * kGroup;
  while (span > 1 && a.heads * row_blocks * ((panels + span - 1) / span) < 4 * threads) span = (span + 1) / 2;
  const int64_t spans = (panels + span - 1) / span;
  const auto task = [&](int64_t index) {
    const int64_t begin = index % spans * span, end = std::min(begin + span, panels);
    const int64_t block = index / spans % row_blocks, head = index / spans / row_blocks;
    const int64_t row = a.tokens * block / row_blocks, rows = a.tokens * (block + 1) / row_blocks - row;
    const LinearArgs own = of_head(head);
    if (begin == 0 && a.further > 0) {
      const T* from = static_cast<const T*>(own.x) + row * own.x_stride + a.in_features;
      T* to = static_cast<T*>(own.out) + row * own.out_stride + a.out_features;
      for (int64_t r = 0; r < rows; ++r) {
        __builtin_memcpy(to + r * own.out_stride, from + r * own.x_stride, a.further * sizeof(T));
      }
    }
#ifdef __AMX_BF16__
    if constexpr (kHasTiles) {
      // what is behind an odd number of inputs is not zero
      if (rows > kTileHeight || padded != a.in_features)
        return TileTask(own, row, rows, begin, end - begin).run();
      for (int64_t panel = begin; panel < end; panel += kStreamPanels) {
        StreamTask(own, row, rows, panel, std::min(kStreamPanels, end - panel)).run();
      }
      return;
    }
#endif
    for (int64_t panel = begin; panel < end; panel += kGroup) {
      const int64_t count = std::min(kGroup, end - panel);
      // A panel may be as short as the distance at which products prefetch, so the next ones are prefetched
      // here.
      fetch_panels(static_cast<const T*>(own.packed) + (panel + count) * panel_size,
                   std::min(kGroup, end - panel - count) * panel_size);
      if (widens) {
        const X* x = static_cast<const X*>(a.workspace) + head * a.tokens * padded;
        run_task<T>(own, x, padded, row, rows, panel, count);
      } else if constexpr (is_same<T, X>) {
        run_task<T>(own, static_cast<const X*>(own.x), own.x_stride, row, rows, panel, count);
      }
    }
  };
  const int64_t tasks = a.heads * row_blocks * spans;
  if (threads == 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
  } else {
    run_parts(tasks, threads, [&](int64_t index, int64_t) { task(index); });
  }
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(heads_linear, HeadsLinearArgs) {
  with_dtype(args.dtype, [&](auto tag) { heads_linear<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
