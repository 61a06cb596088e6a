// Products of matrices of which one or both are quantised.
#include "sim/opapi/quantized.h"
#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

const Dtypes kQuantised = {at::kChar, at::kInt};
const Dtypes kParameters = {at::kLong, at::kUInt64};
// the most elements of the last axis of an operand in memory, and the largest side of a weight whose inputs are
// not quantised
constexpr int64_t kMostElements = 65535;
// rows of a group of scales
constexpr int64_t kLeastGroup = 32;

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

struct Product {
  In x1;
  Weight x2;
  Maybe x1_scale, x2_scale, y_offset, bias;
  Out out;
};

// What goes together: a row of the documentation's table for A2 and A3.
struct Combination {
  at::ScalarType operands, out;
  bool per_token;
  Dtypes scales, biases;
  bool takes_offset = false;
};

// int32 operands hold eight values of 4 bits in each element
const std::vector<Combination> kCombinations = {
    // torch_npu makes parameters of a float32 scale in an eager call; graphs have to be given them
    {at::kChar, at::kHalf, false, kParameters, {at::kInt}},
    {at::kChar, at::kChar, false, {at::kLong, at::kUInt64, at::kFloat}, {at::kInt}, true},
    {at::kChar, at::kBFloat16, false, {at::kFloat, at::kBFloat16}, {at::kInt, at::kBFloat16, at::kFloat}},
    {at::kChar, at::kBFloat16, true, {at::kFloat, at::kBFloat16}, {at::kInt, at::kBFloat16, at::kFloat}},
    {at::kChar, at::kHalf, true, {at::kFloat}, {at::kInt, at::kHalf, at::kFloat}},
    {at::kChar, at::kInt, false, {at::kFloat, at::kBFloat16}, {at::kInt}},
    {at::kInt, at::kHalf, false, kParameters, {at::kInt}},
    {at::kInt, at::kHalf, true, {at::kFloat}, {}},
    {at::kInt, at::kBFloat16, true, {at::kFloat}, {}},
};

const Combination& combination_of(const Product& p) {
  for (const Combination& row : kCombinations) {
    if (row.operands == p.x1.scalar_type() && row.out == p.out.scalar_type() &&
        row.per_token == p.x1_scale.has_value()) {
      return row;
    }
  }
  require(false, "out",
          std::string("such operands do not give ") + c10::toString(p.out.scalar_type()) +
              (p.x1_scale ? " with" : " without") + " scales per token");
  return kCombinations.front();
}

// The last axis in memory, in values: of a transposed view it is the one before.
int64_t last_in_memory(const In& tensor) {
  const int64_t axis = tensor.stride(-1) == 1 || tensor.stride(-2) != 1 ? -1 : -2;
  return tensor.size(axis) * (tensor.scalar_type() == at::kInt ? 8 : 1);
}

void require_bias(const Product& p, const Combination& row) {
  if (!p.bias) return;
  require(!row.biases.empty(), "bias", "it is not supported with these operands");
  p.bias->in(row.biases);
  const int64_t columns = p.out.size(-1);
  if (p.bias->dim() == 1) {
    p.bias->shaped({columns});
  } else {
    require(p.out.dim() == 3, "bias", "three axes belong to results of three axes");
    p.bias->shaped({p.out.size(0), 1, columns});
  }
}

void require_quant_matmul(const Product& p) {
  p.x1.in(kQuantised).rank(2, 6);
  p.x2.in(kQuantised).rank(2, 6);
  p.x2.like(p.x1);
  p.out.in({at::kHalf, at::kBFloat16, at::kChar, at::kInt});
  require(p.x2_scale.has_value(), "x2Scale", "it is required");
  const Combination& row = combination_of(p);
  p.x2_scale->in(row.scales);
  const int64_t columns = p.out.size(-1);
  require(p.x2_scale->numel() == 1 || p.x2_scale->numel() == columns, "x2Scale",
          "it needs one value or one per column");
  if (p.x1_scale) p.x1_scale->in({at::kFloat}).shaped({p.x1.size(-2)});
  require_bias(p, row);
  if (p.y_offset) {
    require(row.takes_offset, "offset", "it belongs to int8 results");
    p.y_offset->in({at::kFloat});
    require(p.y_offset->numel() == 1 || p.y_offset->numel() == columns, "offset",
            "it needs one value or one per column");
  }
  require(last_in_memory(p.x1) <= kMostElements, "x1", "its last axis must not exceed 65535");
  require(last_in_memory(p.x2) <= kMostElements, "x2", "its last axis must not exceed 65535");
  if (p.x2.format == ACL_FORMAT_FRACTAL_NZ) {
    require(p.x2.stride(-1) == 1 || p.x2.size(-1) == 1, "x2", "it must not be transposed in FRACTAL_NZ");
  }
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

// The three shapes of scales: of the matrix, of its columns, or of groups of its rows.
void require_antiquant_scale(const In& scale, int64_t rows, int64_t columns, int64_t group) {
  if (group != 0) {
    scale.shaped({(rows + group - 1) / group, columns});
    return;
  }
  const bool row = scale.dim() == 1 || (scale.dim() == 2 && scale.size(0) == 1);
  require(row && (scale.numel() == 1 || scale.numel() == columns), "antiquantScale",
          "without groups it needs one value or one per column");
}

Work weight_quant_matmul(const In& x, const Weight& weight, const In& scale, const Maybe& offset,
                         const Maybe& quant_scale, const Maybe& bias, int64_t group, const Out& y) {
  x.in(kHalfs).rank(2, 2);
  weight.in(kQuantised).rank(2, 2);
  require(x.numel() > 0, "x", "empty tensors are not supported");
  require(weight.format != ACL_FORMAT_FRACTAL_NZ, "weight",
          "FRACTAL_NZ is for graphs of the graph engine, not for single calls");
  scale.like(x);
  if (offset) offset->like(scale).shaped(scale.sizes());
  require(!quant_scale, "quantScaleOptional", "quantised results are not supported");
  const int64_t rows = x.size(1), columns = y.size(1);
  require(rows <= kMostElements && columns <= kMostElements, "weight", "no axis may exceed 65535");
  require(group == 0 || (group >= kLeastGroup && group % kLeastGroup == 0 && group < rows),
          "antiquantGroupSize", "it must be 0, or a multiple of 32 below the number of rows");
  require_antiquant_scale(scale, rows, columns, group);
  if (bias) {
    bias->in({x.scalar_type() == at::kBFloat16 ? at::kFloat : at::kHalf});
    require(bias->numel() == columns && (bias->dim() == 1 || bias->size(0) == 1), "biasOptional",
            "it needs one value per column");
  }
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
