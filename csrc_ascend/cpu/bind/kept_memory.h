// Memory for large results, such as the logits of hundreds of rows, that outlives them.
#pragma once

#include <ATen/core/Tensor.h>

namespace ascend_vllm {

// A tensor without contents, as at::empty makes it. malloc has the system map so large a tensor and gives it
// back when it is freed, so that a step would touch tens of thousands of fresh pages: that takes longer than
// the product that fills them. One block is therefore kept, grown when needed, and handed out while nobody
// holds it.
at::Tensor large_result(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace ascend_vllm
