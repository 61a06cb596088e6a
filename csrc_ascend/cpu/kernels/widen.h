// Conversion to float32.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct WidenArgs {
  DType dtype;
  const void* x;  // row t starts at t * stride elements
  float* out;     // [rows, width], contiguous
  int64_t rows, stride, width;
};

ASCEND_VLLM_KERNEL(widen, WidenArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {

ASCEND_VLLM_DEFINE_KERNEL(widen, WidenArgs) {
  with_dtype(args.dtype, [&](auto tag) {
    parallel_for(args.rows, args.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const auto* x = static_cast<const decltype(tag)*>(args.x) + row * args.stride;
        float* out = args.out + row * args.width;
        for_lanes(
            args.width, [&](int64_t i) { store(out + i, load(x + i)); },
            [&](int64_t i, int rest) { store_n(out + i, load_n(x + i, rest), rest); });
      }
    });
  });
}

}  // namespace ascend_vllm

#endif
