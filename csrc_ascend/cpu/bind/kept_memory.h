// Cached memory for large results, such as the logits of hundreds of rows.
#pragma once

#include <ATen/core/Tensor.h>

namespace ascend_vllm {

// An uninitialised tensor, as at::empty makes it. malloc maps and unmaps tensors of this size, so that every
// step would fault in tens of thousands of pages, which takes longer than the product that fills them.
// Therefore one block is cached, which grows when needed and is reused when no tensor uses it.
at::Tensor large_result(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace ascend_vllm
