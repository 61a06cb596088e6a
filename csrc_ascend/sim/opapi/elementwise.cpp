// Arithmetic, activations and conversions: one element of the result from one element of each argument.
#include "sim/opapi/table.h"

using namespace ascend_sim;

// The operator and its form in place.
#define UNARY_ONLY(name, dtypes, function)    \
  OPERATOR(aclnn##name, (In self, Out out), { \
    self.in(dtypes);                          \
    return [=] { out.set(function(self)); };  \
  })
#define UNARY(name, dtypes, function)         \
  UNARY_ONLY(name, dtypes, function)          \
  OPERATOR(aclnnInplace##name, (Out self), {  \
    self.in(dtypes);                          \
    return [=] { self.set(function(self)); }; \
  })

UNARY(Exp, kReal, at::exp)
UNARY(Exp2, kReal, at::exp2)
UNARY(Expm1, kReal, at::expm1)
UNARY(Log, kReal, at::log)
UNARY(Log2, kReal, at::log2)
UNARY(Log10, kReal, at::log10)
UNARY(Log1p, kReal, at::log1p)
UNARY(Sqrt, kReal, at::sqrt)
UNARY(Rsqrt, kReal, at::rsqrt)
UNARY(Reciprocal, kReal, at::reciprocal)
UNARY(Sin, kReal, at::sin)
UNARY(Cos, kReal, at::cos)
UNARY(Tan, kReal, at::tan)
UNARY(Atan, kReal, at::atan)
UNARY(Tanh, kReal, at::tanh)
UNARY(Erf, kReal, at::erf)
UNARY(Sigmoid, kFloatsAndDouble, at::sigmoid)
UNARY(Ceil, kFloatsAndDouble, at::ceil)
UNARY(Floor, kReal, at::floor)
UNARY(Frac, kFloatsAndDouble, at::frac)
UNARY(Relu, kReal, at::relu)
UNARY(LogicalNot, kAny, at::logical_not)
UNARY_ONLY(Round, kReal, at::round)
UNARY_ONLY(Trunc, kReal, at::trunc)
UNARY_ONLY(Abs, kReal, at::abs)
UNARY_ONLY(Neg, kReal, at::neg)
UNARY_ONLY(Sign, kAny, at::sign)
UNARY_ONLY(Signbit, kAny, at::signbit)
UNARY_ONLY(BitwiseNot, kBitwise, at::bitwise_not)
UNARY_ONLY(IsFinite, kAny, at::isfinite)
UNARY_ONLY(IsPosInf, kAny, at::isposinf)
UNARY_ONLY(IsNegInf, kAny, at::isneginf)
UNARY_ONLY(Silu, kFloats, at::silu)
UNARY_ONLY(Gelu, kFloats, at::gelu)
UNARY_ONLY(Hardsigmoid, kFloats, at::hardsigmoid)
UNARY_ONLY(Hardswish, kFloats, at::hardswish)

// npu_gelu, which unlike torch's gelu tells the approximations apart
OPERATOR(aclnnGeluV2, (In self, int64_t approximate, Out out), {
  self.in(kFloats);
  require(approximate == 0 || approximate == 1, "approximate", "it must be 0 (none) or 1 (tanh)");
  return [=] { out.set(at::gelu(self, approximate ? "tanh" : "none")); };
})

OPERATOR(aclnnRoundDecimals, (In self, int64_t decimals, Out out),
         { return [=] { out.set(at::round(self, decimals)); }; })

OPERATOR(aclnnSoftplus, (In self, Number beta, Number threshold, Out out), {
  self.in(kFloats);
  return [=] { out.set(at::softplus(self, beta, threshold)); };
})

OPERATOR(aclnnElu, (In self, Number alpha, Number scale, Number inputScale, Out out), {
  self.in(kFloats);
  return [=] { out.set(at::elu(self, alpha, scale, inputScale)); };
})

OPERATOR(aclnnLeakyRelu, (In self, Number negativeSlope, Out out), {
  self.in(kFloatsAndDouble);
  return [=] { out.set(at::leaky_relu(self, negativeSlope)); };
})

OPERATOR(aclnnHardtanh, (In self, Number low, Number high, Out out),
         { return [=] { out.set(at::hardtanh(self, low, high)); }; })

OPERATOR(aclnnGlu, (In self, int64_t dim, Out out), {
  self.in(kFloatsAndDouble);
  return [=] { out.set(at::glu(self, dim)); };
})

OPERATOR(aclnnNanToNum, (In self, float nan, float positive, float negative, Out out),
         { return [=] { out.set(at::nan_to_num(self, nan, positive, negative)); }; })
OPERATOR(aclnnInplaceNanToNum, (Out self, float nan, float positive, float negative),
         { return [=] { self.set(at::nan_to_num(self, nan, positive, negative)); }; })

// Arithmetic of two tensors, of a tensor and a scalar, and both in place.
#define BINARY_ONLY(name, function) \
  OPERATOR(aclnn##name, (In self, In other, Out out), { return [=] { out.set(function(self, other)); }; })
#define BINARY_SCALAR(name, function) \
  OPERATOR(aclnn##name, (In self, Number other, Out out), { return [=] { out.set(function(self, other)); }; })
#define BINARY_IN_PLACE(name, function) \
  OPERATOR(aclnnInplace##name, (Out self, In other), { return [=] { self.set(function(self, other)); }; })
#define BINARY_SCALAR_IN_PLACE(name, function) \
  OPERATOR(aclnnInplace##name, (Out self, Number other), { return [=] { self.set(function(self, other)); }; })
#define BINARY(name, scalar_name, function) \
  BINARY_ONLY(name, function)               \
  BINARY_IN_PLACE(name, function)           \
  BINARY_SCALAR(scalar_name, function)      \
  BINARY_SCALAR_IN_PLACE(scalar_name, function)

BINARY(Mul, Muls, at::mul)
BINARY(Div, Divs, at::div)
BINARY(FloorDivide, FloorDivides, at::floor_divide)
BINARY(RemainderTensorTensor, RemainderTensorScalar, at::remainder)
BINARY(FmodTensor, FmodScalar, at::fmod)
BINARY(PowTensorTensor, PowTensorScalar, at::pow)
BINARY_ONLY(Maximum, at::maximum)
BINARY_ONLY(Minimum, at::minimum)
BINARY_ONLY(Atan2, at::atan2)
BINARY_ONLY(LogAddExp, at::logaddexp)
BINARY_ONLY(LeftShift, at::bitwise_left_shift)
BINARY_SCALAR(LeftShifts, at::bitwise_left_shift)
BINARY_ONLY(RightShift, at::bitwise_right_shift)

OPERATOR(aclnnPowScalarTensor, (Number self, In exponent, Out out),
         { return [=] { out.set(at::pow(self, exponent)); }; })
OPERATOR(aclnnRemainderScalarTensor, (Number self, In other, Out out),
         { return [=] { out.set(at::remainder(self, other)); }; })

// self + alpha * other, and its kin.
#define SCALED(name, scalar_name, function)                                    \
  OPERATOR(aclnn##name, (In self, In other, Number alpha, Out out),            \
           { return [=] { out.set(function(self, other, alpha)); }; })         \
  OPERATOR(aclnn##scalar_name, (In self, Number other, Number alpha, Out out), \
           { return [=] { out.set(function(self, other, alpha)); }; })
#define SCALED_IN_PLACE(name, scalar_name, function)                          \
  OPERATOR(aclnnInplace##name, (Out self, In other, Number alpha),            \
           { return [=] { self.set(function(self, other, alpha)); }; })       \
  OPERATOR(aclnnInplace##scalar_name, (Out self, Number other, Number alpha), \
           { return [=] { self.set(function(self, other, alpha)); }; })

SCALED(Add, Adds, at::add)
SCALED(Sub, Subs, at::sub)
SCALED(Rsub, Rsubs, at::rsub)
SCALED_IN_PLACE(Add, Adds, at::add)
SCALED_IN_PLACE(Sub, Subs, at::sub)

OPERATOR(aclnnAddV3, (Number self, In other, Number alpha, Out out),
         { return [=] { out.set(at::add(at::scalar_tensor(self, other.options()), other, alpha)); }; })

namespace {

std::string_view rounding_of(int64_t mode) {
  require(mode == 1 || mode == 2, "mode", "it must be 1 (trunc) or 2 (floor)");
  return mode == 1 ? "trunc" : "floor";
}

}  // namespace

OPERATOR(aclnnDivMod, (In self, In other, int32_t mode, Out out),
         { return [=, rounding = rounding_of(mode)] { out.set(at::div(self, other, rounding)); }; })
OPERATOR(aclnnDivMods, (In self, Number other, int32_t mode, Out out),
         { return [=, rounding = rounding_of(mode)] { out.set(at::div(self, other, rounding)); }; })
OPERATOR(aclnnInplaceDivMod, (Out self, In other, int32_t mode),
         { return [=, rounding = rounding_of(mode)] { self.set(at::div(self, other, rounding)); }; })
OPERATOR(aclnnInplaceDivMods, (Out self, Number other, int32_t mode),
         { return [=, rounding = rounding_of(mode)] { self.set(at::div(self, other, rounding)); }; })

OPERATOR(aclnnLerp, (In self, In end, In weight, Out out),
         { return [=] { out.set(at::lerp(self, end, weight)); }; })
OPERATOR(aclnnLerps, (In self, In end, Number weight, Out out),
         { return [=] { out.set(at::lerp(self, end, weight)); }; })
OPERATOR(aclnnAddcmul, (In self, In tensor1, In tensor2, Number value, Out out),
         { return [=] { out.set(at::addcmul(self, tensor1, tensor2, value)); }; })
OPERATOR(aclnnAddcdiv, (In self, In tensor1, In tensor2, Number value, Out out),
         { return [=] { out.set(at::addcdiv(self, tensor1, tensor2, value)); }; })

OPERATOR(aclnnCast, (In self, Dtype dtype, Out out), {
  require(dtype.type == out.scalar_type(), "dtype", "it differs from the dtype of out");
  return [=] { out.set(self); };
})
// The source is broadcast to the destination.
OPERATOR(aclnnInplaceCopy, (Out selfRef, In source),
         { return [=] { selfRef.set(source.expand(selfRef.sizes())); }; })
