// Arithmetic, comparisons, activations and copies: one element of the result from one element of each argument.
#include "sim/opapi/table.h"

using namespace ascend_sim;

#define UNARY(name, dtypes, function)        \
  OPERATOR(name, (In self, Out out), {       \
    self.in(dtypes);                         \
    return [=] { out.set(function(self)); }; \
  })
#define UNARY_IN_PLACE(name, dtypes, function) \
  OPERATOR(name, (Out self), {                 \
    self.in(dtypes);                           \
    return [=] { self.set(function(self)); };  \
  })

UNARY(aclnnExp, kFloatsAndDouble, at::exp)
UNARY_IN_PLACE(aclnnInplaceExp, kFloatsAndDouble, at::exp)

OPERATOR(aclnnAdd, (In self, In other, Number alpha, Out out),
         { return [=] { out.set(at::add(self, other, alpha)); }; })
OPERATOR(aclnnMm, (In self, In mat2, Out out, int8_t cube_math_type), {
  mat2.like(self.in(kFloats).rank(2, 2)).rank(2, 2);
  require(cube_math_type >= 0 && cube_math_type <= 3, "cube_math_type", "it must be 0 to 3");
  return [=] { out.set(at::mm(self, mat2)); };
})
OPERATOR(aclnnInplaceCopy, (Out self, In source), { return [=] { self.set(source.expand(self.sizes())); }; })
