// Filling tensors with values and sequences.
#include "sim/opapi/table.h"

using namespace ascend_sim;

OPERATOR(aclnnInplaceFillScalar, (Out selfRef, Number value), { return [=] { selfRef.fill_(value); }; })
OPERATOR(aclnnInplaceFillTensor, (Out selfRef, In value), {
  require(value.numel() == 1, "value", "it must have one element");
  return [=] { selfRef.fill_(value.reshape({})); };
})
OPERATOR(aclnnInplaceZero, (Out selfRef), { return [=] { selfRef.zero_(); }; })
OPERATOR(aclnnInplaceOne, (Out selfRef), { return [=] { selfRef.fill_(1); }; })
OPERATOR(aclnnInplaceFillDiagonal, (Out selfRef, Number fillValue, bool wrap),
         { return [=] { selfRef.fill_diagonal_(fillValue, wrap); }; })
OPERATOR(aclnnEye, (int64_t n, int64_t m, Out out), { return [=] { out.set(at::eye(n, m)); }; })
OPERATOR(aclnnArange, (Number start, Number end, Number step, Out out),
         { return [=] { out.set(at::arange(start, end, step, out.options())); }; })
OPERATOR(aclnnRange, (Number start, Number end, Number step, Out out),
         { return [=] { out.set(at::range(start, end, step, out.options())); }; })
OPERATOR(aclnnLinspace, (Number start, Number end, int64_t steps, Out out),
         { return [=] { out.set(at::linspace(start, end, steps, out.options())); }; })
