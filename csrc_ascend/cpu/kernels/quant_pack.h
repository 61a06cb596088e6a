// Packs codes of weights into panels of 16 outputs and words of 32 bits, see ops/quantized_gemm.py.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct PackCodesArgs {
  const uint8_t* values;  // [rows, in_features], row n starts at n * row_stride
  uint32_t* codes;        // [panels, words, 16]
  int64_t first_row;      // of the packed weight, at which row 0 goes
  int64_t rows, in_features, row_stride, words;
  int bits;  // 4 or 8
};

ASCEND_VLLM_KERNEL(pack_codes, PackCodesArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

template <int kBits>
void pack_code_rows(const PackCodesArgs& a) {
  constexpr int64_t kOutputs = 16, kInputs = 32 / kBits;
  parallel_for(a.rows, a.in_features, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* values = a.values + n * a.row_stride;
      const int64_t row = a.first_row + n;
      uint32_t* to = a.codes + row / kOutputs * a.words * kOutputs + row % kOutputs;
      for (int64_t u = 0; u < a.words; ++u) {
        uint8_t inputs[kInputs] = {};
        const int64_t rest = a.in_features - u * kInputs;
        __builtin_memcpy(inputs, values + u * kInputs, rest < kInputs ? rest : kInputs);
        uint32_t word = 0;
        for (int i = 0; i < kInputs; ++i) word |= uint32_t{inputs[i]} << (kBits * (i / 2) + 16 * (i % 2));
        to[u * kOutputs] = word;
      }
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(pack_codes, PackCodesArgs) {
  args.bits == 4 ? pack_code_rows<4>(args) : pack_code_rows<8>(args);
}

}  // namespace ascend_vllm

#endif
