// Comparisons, logic, bits, clamping and selection by a condition.
#include "sim/opapi/table.h"

using namespace ascend_sim;

#define COMPARISON(name, function)                                \
  OPERATOR(aclnn##name##Tensor, (In self, In other, Out out),     \
           { return [=] { out.set(function(self, other)); }; })   \
  OPERATOR(aclnn##name##Scalar, (In self, Number other, Out out), \
           { return [=] { out.set(function(self, other)); }; })   \
  OPERATOR(aclnnInplace##name##Tensor, (Out self, In other),      \
           { return [=] { self.set(function(self, other)); }; })  \
  OPERATOR(aclnnInplace##name##Scalar, (Out self, Number other),  \
           { return [=] { self.set(function(self, other)); }; })
#define BITWISE(name, function)                                     \
  OPERATOR(aclnn##name##Tensor, (In self, In other, Out out), {     \
    self.in(kBitwise);                                              \
    other.in(kBitwise);                                             \
    return [=] { out.set(function(self, other)); };                 \
  })                                                                \
  OPERATOR(aclnn##name##Scalar, (In self, Number other, Out out), { \
    self.in(kBitwise);                                              \
    return [=] { out.set(function(self, other)); };                 \
  })
#define BITWISE_IN_PLACE(name, function)                           \
  OPERATOR(aclnnInplace##name##Tensor, (Out self, In other), {     \
    self.in(kBitwise);                                             \
    other.in(kBitwise);                                            \
    return [=] { self.set(function(self, other)); };               \
  })                                                               \
  OPERATOR(aclnnInplace##name##Scalar, (Out self, Number other), { \
    self.in(kBitwise);                                             \
    return [=] { self.set(function(self, other)); };               \
  })
#define LOGICAL(name, function) \
  OPERATOR(aclnn##name, (In self, In other, Out out), { return [=] { out.set(function(self, other)); }; })

COMPARISON(Gt, at::gt)
COMPARISON(Ge, at::ge)
COMPARISON(Lt, at::lt)
COMPARISON(Le, at::le)
COMPARISON(Eq, at::eq)
COMPARISON(Ne, at::ne)
BITWISE(BitwiseAnd, at::bitwise_and)
BITWISE(BitwiseOr, at::bitwise_or)
BITWISE(BitwiseXor, at::bitwise_xor)
BITWISE_IN_PLACE(BitwiseAnd, at::bitwise_and)
BITWISE_IN_PLACE(BitwiseXor, at::bitwise_xor)
LOGICAL(LogicalAnd, at::logical_and)
LOGICAL(LogicalOr, at::logical_or)
LOGICAL(LogicalXor, at::logical_xor)

OPERATOR(aclnnInplaceLogicalAnd, (Out self, In other),
         { return [=] { self.set(at::logical_and(self, other)); }; })
OPERATOR(aclnnInplaceLogicalOr, (Out self, In other),
         { return [=] { self.set(at::logical_or(self, other)); }; })

OPERATOR(aclnnIsClose, (In self, In other, double rtol, double atol, bool equalNan, Out out),
         { return [=] { out.set(at::isclose(self, other, rtol, atol, equalNan)); }; })
OPERATOR(aclnnEqual, (In self, In other, Out out),
         { return [=] { out.set(at::scalar_tensor(at::equal(self, other), at::kBool).view(out.sizes())); }; })

OPERATOR(aclnnClamp, (In self, MaybeNumber min, MaybeNumber max, Out out), {
  require(min || max, "min", "one of min and max is required");
  return [=] { out.set(at::clamp(self, min, max)); };
})
OPERATOR(aclnnClampMin, (In self, Number min, Out out), { return [=] { out.set(at::clamp_min(self, min)); }; })
OPERATOR(aclnnClampMax, (In self, Number max, Out out), { return [=] { out.set(at::clamp_max(self, max)); }; })
OPERATOR(aclnnInplaceClampMax, (Out self, Number max), { return [=] { self.set(at::clamp_max(self, max)); }; })
OPERATOR(aclnnClampTensor, (In self, Maybe min, Maybe max, Out out), {
  require(min || max, "min", "one of min and max is required");
  return [=] {
    at::Tensor result = self;
    if (min) result = at::clamp_min(result, *min);
    if (max) result = at::clamp_max(result, *max);
    out.set(result);
  };
})
OPERATOR(aclnnClampMinTensor, (In self, In min, Out out),
         { return [=] { out.set(at::clamp_min(self, min)); }; })
OPERATOR(aclnnClampMaxTensor, (In self, In max, Out out),
         { return [=] { out.set(at::clamp_max(self, max)); }; })
OPERATOR(aclnnInplaceClampMinTensor, (Out self, In min),
         { return [=] { self.set(at::clamp_min(self, min)); }; })
OPERATOR(aclnnInplaceClampMaxTensor, (Out self, In max),
         { return [=] { self.set(at::clamp_max(self, max)); }; })
OPERATOR(aclnnThreshold, (In self, Number threshold, Number value, Out out),
         { return [=] { out.set(at::threshold(self, threshold, value)); }; })

OPERATOR(aclnnSWhere, (In condition, In self, In other, Out out), {
  condition.in({at::kBool, at::kByte});
  other.like(self);
  return [=] { out.set(at::where(condition.to(at::kBool), self, other)); };
})
OPERATOR(aclnnInplaceMaskedFillScalar, (Out selfRef, In mask, Number value), {
  mask.in({at::kBool});
  return [=] { selfRef.set(at::masked_fill(selfRef, mask, value)); };
})
OPERATOR(aclnnInplaceMaskedFillTensor, (Out selfRef, In mask, In value), {
  mask.in({at::kBool});
  require(value.numel() == 1, "value", "it must have one element");
  return [=] { selfRef.set(at::masked_fill(selfRef, mask, value.reshape({}))); };
})
OPERATOR(aclnnInplaceMaskedScatter, (Out selfRef, In mask, In source), {
  mask.in({at::kBool});
  source.like(selfRef);
  return [=] { selfRef.set(at::masked_scatter(selfRef, mask, source)); };
})
OPERATOR(aclnnMaskedSelect, (In self, In mask, Out out), {
  mask.in({at::kBool});
  return [=] { out.set_front(at::masked_select(self, mask)); };
})
