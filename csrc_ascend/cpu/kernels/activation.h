// Gated activations: f(first half of the row) times the second half.
#pragma once

#include "cpu/dispatch.h"
#include "cpu/kernels/gate.h"

namespace ascend_vllm {

struct GateArgs {
  DType dtype;
  Gate gate;
  const void* x;  // row t starts at t * stride elements and has 2 * width of them
  void* out;      // [rows, width], contiguous
  int64_t rows, stride, width;
};

#ifndef ASCEND_VLLM_ISA
// As in products, whose sets differ in how they round subnormal numbers: gated products give the same results.
inline int choice_for(const GateArgs& args) { return choice_of(args.dtype, kOneRow); }
#endif

ASCEND_VLLM_KERNEL(gate_and_mul, GateArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

template <class T, class Activation>
inline void gate_rows(const GateArgs& a, const Activation& activation) {
  constexpr int64_t kPart = 1024;  // wide rows are split, so that a single one can use all threads
  const int64_t parts = (a.width + kPart - 1) / kPart;
  parallel_for(a.rows * parts, 12 * (a.width < kPart ? a.width : kPart), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / parts, start = item % parts * kPart;
      const int64_t size = a.width - start < kPart ? a.width - start : kPart;
      const T* gate = static_cast<const T*>(a.x) + row * a.stride + start;
      const T* up = gate + a.width;
      T* out = static_cast<T*>(a.out) + row * a.width + start;
      for_lanes(
          size, [&](int64_t i) { store(out + i, activation(load(gate + i)) * load(up + i)); },
          [&](int64_t i, int rest) {
            store_n(out + i, activation(load_n(gate + i, rest)) * load_n(up + i, rest), rest);
          });
    }
  });
}

template <class T>
void gate_and_mul(const GateArgs& a) {
  with_gate<T>(a.gate, [&](auto activation) { gate_rows<T>(a, activation); });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(gate_and_mul, GateArgs) {
  with_dtype(args.dtype, [&](auto tag) { gate_and_mul<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
