// Declares kernels, which are compiled once per instruction set, and calls the variant of the chosen one.
//
// A kernel header (cpu/kernels/<op>.h) declares its argument struct and ASCEND_VLLM_KERNEL(<op>, <Args>), then,
// under `#ifdef ASCEND_VLLM_ISA`, implements it in an anonymous namespace and ends with
// ASCEND_VLLM_DEFINE_KERNEL(<op>, <Args>) { ... }. The build compiles the header once per instruction set
// (through cpu/variants/<isa>.cpp), each time with that set's flags; a binding includes the same header without
// ASCEND_VLLM_ISA and gets `<op>_kernel(args)`, which calls the variant of the chosen set. All calls have one
// choice, except where an overload of choice_for(const <Args>&) says otherwise.
//
// Variants are weak references to extern "C" functions: a platform or a kernel may lack some (the next lower
// one is called instead), nothing runs at load time, and there is no central list of kernels.
#pragma once

#include "common/dtype.h"

namespace ascend_vllm {

// Instruction sets of the processors that the library is built for, in ascending order of preference: calls
// X(<name>, ...) for each of them; csrc_ascend/build.py has the same names.
#if defined(__aarch64__)
#define ASCEND_VLLM_FOR_EACH_ISA(X, ...) \
  X(scalar, __VA_ARGS__)                 \
  X(neon, __VA_ARGS__)                   \
  X(neon_dotprod, __VA_ARGS__)           \
  X(neon_bf16, __VA_ARGS__)
#else
#define ASCEND_VLLM_FOR_EACH_ISA(X, ...) \
  X(scalar, __VA_ARGS__)                 \
  X(avx2, __VA_ARGS__)                   \
  X(avx512, __VA_ARGS__)                 \
  X(avx512_vnni, __VA_ARGS__)            \
  X(avx512_bf16, __VA_ARGS__)            \
  X(amx_bf16, __VA_ARGS__)
#endif

#define ASCEND_VLLM_ISA_INDEX_(isa, ...) k_##isa,
enum Isa : int { ASCEND_VLLM_FOR_EACH_ISA(ASCEND_VLLM_ISA_INDEX_) kNumIsas };
#undef ASCEND_VLLM_ISA_INDEX_

#ifndef ASCEND_VLLM_ISA

// Products with quantized weights: in codes of 4 or 8 bits or fp8, by inputs as they are or rounded to 8 bits
// in blocks, and int8 by int8.
enum QuantizedProduct : int {
  kUint4Weights,
  kUint8Weights,
  kFloat8Weights,
  kUint4Rounded,
  kUint8Rounded,
  kInt8ByInt8,
  kNumQuantizedProducts
};

// Calls whose set is chosen separately, for each dtype: matrix products with one row, with at most kMostFewRows
// and with more, attention, and from kFirstQuantized on the same of each of the quantized products.
// ops/native.py has the names.
enum KernelClass : int { kOneRow, kFewRows, kManyRows, kAttention, kFirstQuantized };
constexpr int kNumKernelClasses = kFirstQuantized + 3 * kNumQuantizedProducts;
constexpr int64_t kMostFewRows = 16;

constexpr KernelClass class_of(int64_t rows) {
  return rows <= 1 ? kOneRow : rows <= kMostFewRows ? kFewRows : kManyRows;
}
constexpr KernelClass class_of(QuantizedProduct product, int64_t rows) {
  return static_cast<KernelClass>(kFirstQuantized + 3 * product + class_of(rows));
}

// Index of a choice: that of a class in a dtype, or kOtherKernels.
constexpr int choice_of(DType dtype, KernelClass kernel_class) {
  return static_cast<int>(dtype) * kNumKernelClasses + kernel_class;
}
constexpr int kOtherKernels = 3 * kNumKernelClasses, kNumChoices = kOtherKernels + 1;

// The set in use: the best of the machine, or what ascend_vllm_set_cpu_isa() chose.
Isa active_isa(int choice);

template <class Args>
inline int choice_for(const Args&) {
  return kOtherKernels;
}

template <class Args>
void call_variant(const Args& args, void (*const (&variants)[kNumIsas])(const Args&)) {
  int isa = active_isa(choice_for(args));
  while (isa > 0 && variants[isa] == nullptr) --isa;
  variants[isa](args);
}

#define ASCEND_VLLM_DECLARE_VARIANT_(isa, op, Args) \
  extern "C" __attribute__((weak, visibility("hidden"))) void ascend_vllm_##op##_##isa(const Args&);
#define ASCEND_VLLM_VARIANT_(isa, op, ...) ascend_vllm_##op##_##isa,
#define ASCEND_VLLM_KERNEL(op, Args)                                                \
  ASCEND_VLLM_FOR_EACH_ISA(ASCEND_VLLM_DECLARE_VARIANT_, op, Args)                  \
  inline void op##_kernel(const Args& args) {                                       \
    call_variant<Args>(args, {ASCEND_VLLM_FOR_EACH_ISA(ASCEND_VLLM_VARIANT_, op)}); \
  }

#else

#define ASCEND_VLLM_KERNEL(op, Args)
#define ASCEND_VLLM_NAME2_(op, isa) ascend_vllm_##op##_##isa
#define ASCEND_VLLM_NAME_(op, isa) ASCEND_VLLM_NAME2_(op, isa)
#define ASCEND_VLLM_DEFINE_KERNEL(op, Args) \
  extern "C" __attribute__((visibility("hidden"))) void ASCEND_VLLM_NAME_(op, ASCEND_VLLM_ISA)(const Args& args)

namespace {

// Calls body(T{}) with T the storage type of `dtype`.
template <class Body>
inline void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kBFloat16:
      return body(bfloat16{});
    case DType::kFloat16:
      return body(float16{});
  }
}

}  // namespace

#endif

}  // namespace ascend_vllm
