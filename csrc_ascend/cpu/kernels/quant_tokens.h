// Rounds rows to 8 bits, see quantize_tokens and quantize_static of ops/quantized_gemm.py.
#pragma once

#include "cpu/kernels/quant_token.h"

namespace ascend_vllm {

ASCEND_VLLM_KERNEL(quantize_tokens, QuantizeTokensArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {

ASCEND_VLLM_DEFINE_KERNEL(quantize_tokens, QuantizeTokensArgs) {
  parallel_for(args.rows, args.in_features, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      with_dtype(args.dtype, [&](auto tag) { quantize_row<decltype(tag)>(args, t); });
    }
  });
}

}  // namespace ascend_vllm

#endif
