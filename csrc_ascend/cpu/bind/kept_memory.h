// Cached memory for large results: those of prompts, and logits of many rows.
#pragma once

#include <ATen/core/Tensor.h>

namespace ascend_vllm {

// An uninitialised tensor, as at::empty makes it. From 1 MiB on it takes the memory of one that is gone: malloc
// would map and unmap the largest for every step, faulting in tens of thousands of pages, which takes longer
// than the product that fills them, and keep about three times what a step of a prompt needs of the others.
at::Tensor kept_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace ascend_vllm
