// Norms and activations of language models.
#include "sim/opapi/aten.h"
#include "sim/opapi/table.h"

namespace ascend_sim {
namespace {

Dtypes chip_floats() { return soc() == Soc::P310 ? Dtypes{at::kFloat, at::kHalf} : kFloats; }

// The scale covers the last axes of the input.
void require_scale(const In& gamma, const In& x) {
  x.rank(1, 8);
  const int64_t axes = gamma.dim();
  require(axes >= 1 && axes <= x.dim() && x.sizes().slice(x.dim() - axes) == gamma.sizes(), gamma.name,
          "its shape must be that of the last axes of " + x.name);
}

// The statistics have the input's shape with ones in the place of the normed axes.
std::vector<int64_t> statistics_shape(const In& x, const In& gamma) {
  std::vector<int64_t> shape = x.sizes().vec();
  for (int64_t d = x.dim() - gamma.dim(); d < x.dim(); ++d) shape[d] = 1;
  return shape;
}

struct Normed {
  at::Tensor y, rstd;
};

Normed rms_norm(const at::Tensor& x, const at::Tensor& gamma, double epsilon) {
  std::vector<int64_t> axes;
  for (int64_t d = x.dim() - gamma.dim(); d < x.dim(); ++d) axes.push_back(d);
  const at::Tensor rstd = at::rsqrt(at::mean(x * x, axes, true) + epsilon);
  return {x * rstd * gamma.to(at::kFloat), rstd};
}

void require_norm(const In& x, const In& gamma, const Out& y, double epsilon) {
  x.in(chip_floats());
  require_scale(gamma, x);
  y.like(x).shaped(x.sizes());
  require(epsilon >= 0, "epsilon", "must not be negative");
}

// The scale of a norm has the input's dtype; on Atlas A2 and A3 aclnnRmsNorm also takes it in float32.
void require_gamma(const In& gamma, const In& x, bool or_float) {
  if (or_float && soc() != Soc::P310 && gamma.scalar_type() == at::kFloat) return;
  gamma.like(x);
}

}  // namespace

OPERATOR(aclnnRmsNorm, (In x, In gamma, double epsilon, Out y, Out rstd), {
  require_norm(x, gamma, y, epsilon);
  require_gamma(gamma, x, true);
  rstd.in({at::kFloat}).shaped(statistics_shape(x, gamma));
  return [=] {
    const Normed normed = rms_norm(x.to(at::kFloat), gamma, epsilon);
    y.set(normed.y);
    rstd.set(normed.rstd);
  };
})

OPERATOR(aclnnGemmaRmsNorm, (In x, In gamma, double epsilon, Out y, Out rstd), {
  require(soc() != Soc::P310, "x", "the operator does not exist on Ascend310P");
  require_norm(x, gamma, y, epsilon);
  require_gamma(gamma, x, false);
  rstd.in({at::kFloat}).shaped(statistics_shape(x, gamma));
  return [=] {
    const Normed normed = rms_norm(x.to(at::kFloat), gamma.to(at::kFloat) + 1, epsilon);
    y.set(normed.y);
    rstd.set(normed.rstd);
  };
})

// `x` is the sum, the next residual.
OPERATOR(aclnnAddRmsNorm, (In x1, In x2, In gamma, double epsilon, Out y, Out rstd, Out x), {
  require_norm(x1, gamma, y, epsilon);
  require_gamma(gamma, x1, false);
  x2.like(x1).shaped(x1.sizes());
  x.like(x1).shaped(x1.sizes());
  rstd.in({at::kFloat}).shaped(statistics_shape(x1, gamma));
  return [=] {
    const at::Tensor sum = x1.to(at::kFloat) + x2.to(at::kFloat);
    const Normed normed = rms_norm(sum, gamma, epsilon);
    x.set(sum);
    y.set(normed.y);
    rstd.set(normed.rstd);
  };
})

// The normed sum takes the place of x1, the sum that of x2.
OPERATOR(aclnnInplaceAddRmsNorm, (Out x1, Out x2, In gamma, double epsilon, Out rstd), {
  require_norm(x1, gamma, x1, epsilon);
  require_gamma(gamma, x1, false);
  x2.like(x1).shaped(x1.sizes());
  rstd.in({at::kFloat}).shaped(statistics_shape(x1, gamma));
  also_reads(bytes_of(x1) + bytes_of(x2));
  return [=] {
    const at::Tensor sum = x1.to(at::kFloat) + x2.to(at::kFloat);
    const Normed normed = rms_norm(sum, gamma, epsilon);
    x1.set(normed.y);
    x2.set(sum);
    rstd.set(normed.rstd);
  };
})

OPERATOR(aclnnLayerNorm,
         (In input, Ints normalized_shape, Maybe weight, Maybe bias, double eps, Out out, MaybeOut mean,
          MaybeOut rstd),
         {
           input.in(chip_floats());
           const int64_t axes = static_cast<int64_t>(normalized_shape.size());
           require(axes >= 1 && axes <= input.dim() &&
                       input.sizes().slice(input.dim() - axes) == at::IntArrayRef(normalized_shape),
                   "normalized_shape", "must be the last axes of input");
           if (weight) weight->shaped(normalized_shape);
           if (bias) bias->shaped(normalized_shape);
           out.like(input).shaped(input.sizes());
           return [=] {
             const auto wide = [](const Maybe& tensor) {
               return tensor ? std::optional<at::Tensor>(tensor->to(at::kFloat)) : std::nullopt;
             };
             const auto [y, centre, spread] =
                 at::native_layer_norm(input.to(at::kFloat), normalized_shape, wide(weight), wide(bias), eps);
             out.set(y);
             if (mean) mean->copy_(centre.view(mean->sizes()));
             if (rstd) rstd->copy_(spread.view(rstd->sizes()));
           };
         })

// The first half is gated by itself: silu(a) * b.
OPERATOR(aclnnSwiGlu, (In x, int64_t dim, Out out), {
  x.in(chip_floats()).rank(1, 8).dense();
  require(dim >= -x.dim() && dim < x.dim(), "dim", std::to_string(dim) + " is no axis of x");
  const int64_t axis = dim < 0 ? dim + x.dim() : dim;
  require(x.size(axis) % 2 == 0, "x", "axis " + std::to_string(axis) + " has an odd size and cannot be halved");
  std::vector<int64_t> half = x.sizes().vec();
  half[axis] /= 2;
  out.like(x).shaped(half);
  return [=] {
    const std::vector<at::Tensor> halves = x.to(at::kFloat).chunk(2, axis);
    out.set(at::silu(halves[0]) * halves[1]);
  };
})

OPERATOR(aclnnFastGelu, (In self, Out out), {
  self.in(chip_floats());
  out.like(self).shaped(self.sizes());
  return [=] {
    const at::Tensor x = self.to(at::kFloat);
    out.set(x * at::sigmoid(x * 1.702));
  };
})

// gelu(a) * b of the halves of the last axis.
OPERATOR(aclnnGeluMul, (In input, Text approximate, Out out), {
  input.in(chip_floats()).rank(2, 8);
  require(approximate == "none" || approximate == "tanh", "approximate",
          "\"" + approximate + "\" is neither none nor tanh");
  std::vector<int64_t> half = input.sizes().vec();
  require(half.back() % 2 == 0 && half.back() <= 1024 * 1024, "input", "its last axis cannot be halved");
  half.back() /= 2;
  out.like(input).shaped(half);
  return [=] {
    const std::vector<at::Tensor> halves = input.to(at::kFloat).chunk(2, -1);
    out.set(at::gelu(halves[0], approximate) * halves[1]);
  };
})

// Merges partial results of attention over parts of the keys, weighted by their log sums of exponentials.
OPERATOR(aclnnAttentionUpdate, (InList lse, InList local_out, int64_t update_type, Out out, MaybeOut lse_out), {
  require(soc() != Soc::P310, "lse", "the operator does not exist on Ascend310P");
  require(!lse.empty() && lse.size() <= 16, "lse", std::to_string(lse.size()) + " parts must be 1 to 16");
  require(lse.size() == local_out.size(), "local_out",
          std::to_string(local_out.size()) + " parts, but lse has " + std::to_string(lse.size()));
  require(update_type == 0 || update_type == 1, "update_type",
          std::to_string(update_type) + " is neither 0 nor 1");
  const In& first = local_out.front().in(kFloats).rank(2, 2);
  for (size_t i = 0; i < lse.size(); ++i) {
    lse[i].in({at::kFloat}).shaped({first.size(0)});
    local_out[i].like(first).shaped(first.sizes());
  }
  require(first.size(1) >= 8 && first.size(1) <= 512 && first.size(1) % 8 == 0, "local_out",
          "head size " + std::to_string(first.size(1)) + " must be a multiple of 8 from 8 to 512");
  out.like(first).shaped(first.sizes());
  require(update_type == 0 || lse_out, "lse_out", "must be given with update_type 1");
  return [=] {
    std::vector<at::Tensor> sums;
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < lse.size(); ++i) {
      // Infinity marks a part that saw no key.
      const at::Tensor sum = lse[i];
      sums.push_back(sum.masked_fill(sum.eq(INFINITY), -INFINITY));
      parts.push_back(local_out[i].to(at::kFloat));
    }
    const at::Tensor all = at::stack(sums);
    const at::Tensor total = at::logsumexp(all, 0);
    const at::Tensor weights = at::exp(all - total).nan_to_num(0.0).unsqueeze(-1);
    out.set((at::stack(parts) * weights).sum(0));
    if (lse_out) lse_out->set(total);
  };
})

}  // namespace ascend_sim
