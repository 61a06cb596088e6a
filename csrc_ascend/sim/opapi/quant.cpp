// Quantisation of activations, and the parameters of quantised products.
#include "sim/opapi/quantized.h"
#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

const Dtypes kQuantised = {at::kChar, at::kInt};

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
           scale.like(x);
           if (offset) offset->like(x).shaped(scale.sizes());
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
