// The codes of quantized weights, as operators name them.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/kernels/quant_tasks.h"

namespace ascend_vllm {

inline Code code_of(c10::string_view name) {
  TORCH_CHECK_VALUE(name == "uint4" || name == "uint8" || name == "float8_e4m3",
                    "code must be 'uint4', 'uint8' or 'float8_e4m3', got '", name, "'");
  return name == "uint4" ? Code::kUint4 : name == "uint8" ? Code::kUint8 : Code::kFloat8E4m3;
}

}  // namespace ascend_vllm
