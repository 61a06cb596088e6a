// Quantisation and products of quantised matrices.
#include "sim/opapi/quantized.h"
#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

const Dtypes kQuantised = {at::kChar, at::kInt};
const Dtypes kScales = {at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kUInt64};

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

// Largest quantised value of the result's dtype.
double top_of(const Out& y) { return y.scalar_type() == at::kInt ? 7 : 127; }

// x times the smoothing factors, of one vector or of the expert that a row belongs to (group ends are
// cumulative).
at::Tensor smoothed(const In& x, const Maybe& smooth, const Maybe& group_index) {
  if (!smooth) return wide(x);
  if (!group_index) return wide(x) * wide(*smooth).reshape({-1});
  const at::Tensor rows = at::arange(x.numel() / x.size(-1));
  const at::Tensor expert = at::bucketize(rows, group_index->to(at::kLong), false, true);
  return wide(x) * wide(*smooth).index_select(0, expert).view(x.sizes());
}

// Symmetric: y = round(x / scale), scale = max|x| / top. With an offset the range of x fills that of y.
void quantise_dynamically(const at::Tensor& x, const Out& y, const Out& scale, const MaybeOut& offset,
                          bool all) {
  const auto reduce = [&](const at::Tensor& t) { return all ? t.max().view({1}) : t.amax(-1, true); };
  const double top = top_of(y);
  if (!offset) {
    const at::Tensor step = reduce(x.abs()) / top;
    set_quantized(y, x / step.clamp_min(1e-30));
    scale.set(step.view(scale.sizes()));
    return;
  }
  const at::Tensor high = reduce(x), low = -reduce(-x);
  const at::Tensor step = (high - low) / (2 * top + 1), shift = top - high / step.clamp_min(1e-30);
  set_quantized(y, x / step.clamp_min(1e-30) + shift);
  scale.set(step.view(scale.sizes()));
  offset->set(shift.view(offset->sizes()));
}

Work dynamic_quant(const In& x, const Maybe& smooth, const Maybe& group_index, const Out& y, const Out& scale,
                   const MaybeOut& offset, bool per_tensor) {
  x.in(kHalfs).rank(per_tensor ? 1 : 2, 8);
  y.in(kQuantised);
  scale.in({at::kFloat});
  if (smooth) smooth->like(x);
  if (group_index) group_index->in({at::kInt});
  return [=] { quantise_dynamically(smoothed(x, smooth, group_index), y, scale, offset, per_tensor); };
}

bool is_per_tensor(const Text& mode) {
  require(mode == "pertoken" || mode == "pertensor", "quantMode", "'" + mode + "' is not supported");
  return mode == "pertensor";
}

}  // namespace

OPERATOR(aclnnDynamicQuantV2,
         (In x, Maybe smoothScales, Maybe groupIndex, int64_t dstType, Out y, Out scale, MaybeOut offset),
         { return dynamic_quant(x, smoothScales, groupIndex, y, scale, offset, false); })
OPERATOR(aclnnDynamicQuantV3,
         (In x, Maybe smoothScales, Maybe groupIndex, int64_t dstType, bool isSymmetrical, Text quantMode,
          Out y, Out scale, MaybeOut offset),
         { return dynamic_quant(x, smoothScales, groupIndex, y, scale, offset, is_per_tensor(quantMode)); })

// y = round(x * scale + offset), scale and offset for the whole tensor or along an axis.
OPERATOR(aclnnAscendQuantV3,
         (In x, In scale, Maybe offset, bool sqrtMode, Text roundMode, int32_t dstType, int32_t axis, Out y), {
           x.in(kFloats);
           y.in(kQuantised);
           require(roundMode == "round", "roundMode", "only 'round' is supported");
           require(axis == -1 || axis == x.dim() - 1, "axis", "only the last one is supported");
           require(scale.numel() == 1 || scale.numel() == x.size(-1), "scale",
                   "it needs one value or one per column");
           if (offset) offset->shaped(scale.sizes());
           return [=] {
             const at::Tensor factor = wide(scale).reshape({-1});
             at::Tensor values = wide(x) * (sqrtMode ? factor * factor : factor);
             if (offset) values = values + wide(*offset).reshape({-1});
             set_quantized(y, values);
           };
         })
// y = round(x / scale) + zero point.
OPERATOR(aclnnQuantize, (In x, In scales, Maybe zeroPoints, Dtype dtype, int32_t axis, Out out), {
  x.in(kFloats);
  require(dtype.type == out.scalar_type(), "dtype", "it differs from the dtype of out");
  return [=] {
    std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
    shape[static_cast<size_t>(axis < 0 ? axis + x.dim() : axis)] = scales.numel();
    at::Tensor values = at::round(wide(x) / wide(scales).view(shape));
    if (zeroPoints) values = values + wide(*zeroPoints).view(shape);
    if (out.scalar_type() == at::kChar) values = values.clamp(-128, 127);
    if (out.scalar_type() == at::kByte) values = values.clamp(0, 255);
    out.set(values);
  };
})

namespace {

// The parameter of the matrix unit: the scale's bits, of which the lowest 13 are dropped (or rounded), an
// offset of 9 bits from bit 37 on, and bit 46.
at::Tensor quant_parameters(const at::Tensor& scale, const Maybe& offset, int64_t round_mode) {
  at::Tensor bits = scale.contiguous().view(at::kInt).to(at::kLong);
  bits = at::bitwise_and(bits, 0xFFFFFFFFL);
  if (round_mode) bits = bits + 0x1000;
  bits = at::bitwise_and(bits, 0xFFFFE000L);
  bits = at::bitwise_or(bits, 1L << 46);
  if (!offset) return bits;
  const at::Tensor nine = at::bitwise_and(at::round(*offset).clamp(-256, 255).to(at::kLong), 0x1FF);
  return at::bitwise_or(bits, at::bitwise_left_shift(nine, 37));
}

void require_quant_parameters(const In& scale, const Maybe& offset) {
  scale.in({at::kFloat}).rank(1, 2);
  if (offset) offset->in({at::kFloat});
}

}  // namespace

OPERATOR(aclnnTransQuantParamV3, (In scale, Maybe offset, int64_t roundMode, Out out), {
  require_quant_parameters(scale, offset);
  require(roundMode == 0 || roundMode == 1, "roundMode", "it must be 0 (truncate) or 1 (round)");
  return [=] { out.set(quant_parameters(scale, offset, roundMode)); };
})
namespace {

struct Product {
  In x1;
  Weight x2;
  Maybe x1_scale, x2_scale, y_offset, bias;
  Out out;
};

void require_quant_matmul(const Product& p) {
  p.x1.in(kQuantised).rank(2, 6);
  p.x2.in(kQuantised).rank(2, 6);
  p.out.in({at::kHalf, at::kBFloat16, at::kChar, at::kInt});
  require(p.x2_scale.has_value(), "x2Scale", "it is required");
  p.x2_scale->in(kScales);
  const bool packed = p.x2_scale->scalar_type() == at::kLong || p.x2_scale->scalar_type() == at::kUInt64;
  require(p.out.scalar_type() != at::kHalf || packed || p.x1_scale, "x2Scale",
          "a float16 result without per-token scales needs int64 parameters (npu_trans_quant_param)");
  if (p.x1_scale) p.x1_scale->in({at::kFloat}).shaped({p.x1.size(-2)});
  if (p.bias) p.bias->in({at::kInt, at::kFloat, at::kHalf, at::kBFloat16});
}

// Integer sums are exact in float64. An integer bias joins the sums before they are scaled, another one after.
void quant_matmul(const Product& p, bool transpose1, bool transpose2) {
  at::Tensor left = int8_values(p.x1, p.x1).to(at::kDouble),
             right = int8_values(p.x2, p.x2.nd()).to(at::kDouble);
  if (transpose1) left = left.transpose(-1, -2);
  if (transpose2) right = right.transpose(-1, -2);
  at::Tensor sums = at::matmul(left, right);
  const bool integer_bias = p.bias && p.bias->scalar_type() == at::kInt;
  if (integer_bias) sums = sums + p.bias->to(at::kDouble);
  if (p.out.scalar_type() == at::kInt) return p.out.set(sums.to(at::kInt));
  at::Tensor result = sums * scale_values(*p.x2_scale).reshape({-1}).to(at::kDouble);
  if (p.x1_scale) result = result * p.x1_scale->to(at::kDouble).unsqueeze(-1);
  if (p.bias && !integer_bias) result = result + p.bias->to(at::kDouble);
  if (p.out.scalar_type() != at::kChar) return p.out.set(result);
  if (p.y_offset) result = result + p.y_offset->to(at::kDouble);
  set_quantized(p.out, result);
}

}  // namespace

OPERATOR(aclnnQuantMatmulV5,
         (In x1, Weight x2, Maybe x1Scale, Maybe x2Scale, Maybe yScale, Maybe x1Offset, Maybe x2Offset,
          Maybe yOffset, Maybe bias, bool transposeX1, bool transposeX2, int64_t groupSize, Out out),
         {
           require(x2.format != ACL_FORMAT_FRACTAL_NZ, "x2",
                   "a fractal weight goes to aclnnQuantMatmulWeightNz");
           require(!yScale && !x1Offset && groupSize == 0, "groupSize",
                   "group-wise products are not supported");
           const Product call{x1, x2, x1Scale, x2Scale, yOffset ? yOffset : x2Offset, bias, out};
           require_quant_matmul(call);
           return [=] { quant_matmul(call, transposeX1, transposeX2); };
         })
OPERATOR(aclnnQuantMatmulWeightNz,
         (In x1, Weight x2, Maybe x1Scale, Maybe x2Scale, Maybe yScale, Maybe x1Offset, Maybe x2Offset,
          Maybe yOffset, Maybe bias, bool transposeX1, bool transposeX2, int64_t groupSize, Out out),
         {
           require(x2.format == ACL_FORMAT_FRACTAL_NZ, "x2", "it must be in the format FRACTAL_NZ");
           require(!yScale && !x1Offset && groupSize == 0, "groupSize",
                   "group-wise products are not supported");
           const Product call{x1, x2, x1Scale, x2Scale, yOffset ? yOffset : x2Offset, bias, out};
           require_quant_matmul(call);
           return [=] { quant_matmul(call, transposeX1, transposeX2); };
         })

namespace {

// (weight + offset) * scale with scales of the tensor, of columns, or of groups of rows.
at::Tensor dequantised(const at::Tensor& weight, const In& scale, const Maybe& offset, int64_t group) {
  const int64_t rows = weight.size(0), columns = weight.size(1);
  const auto spread = [&](const at::Tensor& values) {
    if (values.numel() == 1) return wide(values).reshape({1, 1});
    if (group == 0) return wide(values).reshape({1, columns});
    return wide(values).repeat_interleave(group, 0).slice(0, 0, rows);
  };
  const at::Tensor shifted = offset ? wide(weight) + spread(*offset) : wide(weight);
  return shifted * spread(scale);
}

Work weight_quant_matmul(const In& x, const Weight& weight, const In& scale, const Maybe& offset,
                         const Maybe& quant_scale, const Maybe& bias, int64_t group, const Out& y) {
  x.in(kHalfs).rank(2, 2);
  weight.in(kQuantised).rank(2, 2);
  scale.like(x);
  if (offset) offset->like(scale).shaped(scale.sizes());
  require(!quant_scale, "quantScaleOptional", "quantised results are not supported");
  require(group == 0 || (group >= 32 && group % 32 == 0), "antiquantGroupSize",
          "it must be 0 or a multiple of 32 from 32 on");
  if (bias) bias->in({at::kHalf, at::kFloat});
  return [=] {
    const at::Tensor matrix = dequantised(int8_values(weight, weight.nd()), scale, offset, group);
    at::Tensor result = at::matmul(wide(x), matrix);
    if (bias) result = result + wide(*bias);
    y.set(result);
  };
}

}  // namespace

OPERATOR(aclnnWeightQuantBatchMatmulV2,
         (In x, Weight weight, In antiquantScale, Maybe antiquantOffsetOptional, Maybe quantScaleOptional,
          Maybe quantOffsetOptional, Maybe biasOptional, int32_t antiquantGroupSize, Out y),
         {
           return weight_quant_matmul(x, weight, antiquantScale, antiquantOffsetOptional, quantScaleOptional,
                                      biasOptional, antiquantGroupSize, y);
         })
OPERATOR(aclnnWeightQuantBatchMatmulV3,
         (In x, Weight weight, In antiquantScale, Maybe antiquantOffsetOptional, Maybe quantScaleOptional,
          Maybe quantOffsetOptional, Maybe biasOptional, int32_t antiquantGroupSize, int32_t innerPrecise,
          Out y),
         {
           return weight_quant_matmul(x, weight, antiquantScale, antiquantOffsetOptional, quantScaleOptional,
                                      biasOptional, antiquantGroupSize, y);
         })
