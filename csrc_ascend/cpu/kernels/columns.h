// Sums of two matrices, and matrices beside each other.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct AddRowsArgs {
  DType dtype;
  const void* x;  // row t starts at t * x_stride elements
  const void* y;  // row t starts at t * y_stride elements
  void* out;      // [rows, width], contiguous
  int64_t rows, x_stride, y_stride, width;
};

struct CopyRowsArgs {
  const char* x;                           // row t starts at t * stride bytes
  char* out;                               // row t starts at t * out_stride bytes
  int64_t rows, stride, out_stride, size;  // bytes
};

ASCEND_VLLM_KERNEL(add_rows, AddRowsArgs)
ASCEND_VLLM_KERNEL(copy_rows, CopyRowsArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include <cstring>

#include "cpu/parallel.h"

namespace ascend_vllm {

ASCEND_VLLM_DEFINE_KERNEL(add_rows, AddRowsArgs) {
  with_dtype(args.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(args.rows, args.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
        const T* y = static_cast<const T*>(args.y) + row * args.y_stride;
        T* out = static_cast<T*>(args.out) + row * args.width;
        for_lanes(
            args.width, [&](int64_t i) { store(out + i, load(x + i) + load(y + i)); },
            [&](int64_t i, int rest) { store_n(out + i, load_n(x + i, rest) + load_n(y + i, rest), rest); });
      }
    });
  });
}

ASCEND_VLLM_DEFINE_KERNEL(copy_rows, CopyRowsArgs) {
  parallel_for(args.rows, args.size / 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(args.out + row * args.out_stride, args.x + row * args.stride, args.size);
    }
  });
}

}  // namespace ascend_vllm

#endif
