// Mixture of experts: choosing experts, sorting tokens by expert, products per expert and the way back.
#include <limits>

#include "sim/opapi/quantized.h"
#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

// the most experts, choices and groups that the operators take
constexpr int64_t kMaxGatedExperts = 2048, kMaxSoftmaxChoices = 1024, kMaxRoutedExperts = 10240,
                  kMaxUnpermutedChoices = 512;

void require_gating(const In& x, int64_t k, const Out& y, const Out& expert_idx) {
  x.in(kFloats).rank(2, 3);
  require(k > 0 && k <= x.size(-1), "k", "it must lie in [1, number of experts]");
  y.like(x);
  expert_idx.in({at::kInt});
}

void require_softmax_gating(const In& x, int64_t k, const Out& y, const Out& expert_idx) {
  require_gating(x, k, y, expert_idx);
  require(k <= kMaxSoftmaxChoices, "k", "it must not exceed 1024");
}

struct Gating {
  int64_t k, k_group, group_count, group_select_mode, renorm, norm_type;
  double scaling, eps;
};

void require_groups(const In& x, const Gating& g) {
  const int64_t experts = x.size(1);
  require(experts <= kMaxGatedExperts, "x", "more than 2048 experts are not supported");
  require(g.group_count > 0 && experts % g.group_count == 0, "groupCount",
          "it must divide the number of experts");
  const int64_t group = experts / g.group_count, aligned = (group + 31) / 32 * 32;
  require(group > 2, "groupCount", "groups must have more than two experts");
  require(aligned * g.group_count <= kMaxGatedExperts, "groupCount",
          "the experts of all groups, rounded up to a multiple of 32 in each, must not exceed 2048");
  require(g.k_group > 0 && g.k_group <= g.group_count, "kGroup", "it must lie in [1, groupCount]");
  require(g.k <= group * g.k_group, "k", "it must not exceed the experts of kGroup groups");
  require(g.group_select_mode == 0 || g.group_select_mode == 1, "groupSelectMode",
          "it must be 0 (best) or 1 (two best)");
  require(g.renorm == 0, "renorm", "only 0 is supported");
  require(g.norm_type == 0 || g.norm_type == 1, "normType", "it must be 0 (softmax) or 1 (sigmoid)");
}

// Scores of the experts outside the best `k_group` groups become minus infinity. A group counts by its best
// score, or by the sum of its two best.
at::Tensor within_best_groups(const at::Tensor& scores, const Gating& g) {
  if (g.group_count == 1) return scores;
  const at::Tensor groups = scores.view({scores.size(0), g.group_count, -1});
  const int64_t counted = g.group_select_mode == 0 ? 1 : 2;
  const at::Tensor strength = std::get<0>(groups.topk(counted, -1)).sum(-1);
  const at::Tensor best = std::get<1>(strength.topk(g.k_group, -1));
  const at::Tensor kept = at::zeros_like(strength, at::kBool).scatter_(1, best, true);
  return groups.masked_fill(kept.logical_not().unsqueeze(-1), -std::numeric_limits<double>::infinity())
      .reshape(scores.sizes());
}

}  // namespace

OPERATOR(aclnnMoeGatingTopKSoftmax, (In x, Maybe finished, int64_t k, Out y, Out expertIdx, Out rowIdx), {
  require_softmax_gating(x, k, y, expertIdx);
  require(!finished, "finished", "it is not supported");
  return [=] {
    const auto [values, indices] = at::topk(at::softmax(wide(x), -1), k, -1);
    y.set(values);
    expertIdx.set(indices);
    rowIdx.set(at::arange(rowIdx.numel(), at::kInt).view({k, -1}).t().reshape(rowIdx.sizes()));
  };
})
OPERATOR(aclnnMoeGatingTopKSoftmaxV2,
         (In x, Maybe finished, int64_t k, int64_t renorm, bool softmaxFlag, Out y, Out expertIdx,
          MaybeOut softmaxResult),
         {
           require_softmax_gating(x, k, y, expertIdx);
           require(!finished, "finished", "it is not supported");
           return [=] {
             const at::Tensor all = at::softmax(wide(x), -1);
             const auto [values, indices] = at::topk(all, k, -1);
             y.set(renorm ? values / values.sum(-1, true) : values);
             expertIdx.set(indices);
             if (softmaxFlag && softmaxResult) softmaxResult->set(all);
           };
         })
OPERATOR(aclnnMoeGatingTopK,
         (In x, Maybe bias, int64_t k, int64_t kGroup, int64_t groupCount, int64_t groupSelectMode,
          int64_t renorm, int64_t normType, bool outFlag, double routedScalingFactor, double eps, Out y,
          Out expertIdx, MaybeOut out),
         {
           require_gating(x.rank(2, 2), k, y, expertIdx);
           if (bias) bias->like(x).shaped({x.size(1)});
           const Gating g{k, kGroup, groupCount, groupSelectMode, renorm, normType, routedScalingFactor, eps};
           require_groups(x, g);
           return [=] {
             const at::Tensor scores = g.norm_type == 0 ? at::softmax(wide(x), -1) : at::sigmoid(wide(x));
             const at::Tensor biased = within_best_groups(bias ? scores + wide(*bias) : scores, g);
             const at::Tensor chosen = std::get<1>(biased.topk(g.k, -1));
             at::Tensor weights = scores.gather(1, chosen);
             if (g.norm_type == 1) weights = weights / (weights.sum(-1, true) + g.eps);
             y.set(weights * g.scaling);
             expertIdx.set(chosen);
             if (outFlag && out) out->set(scores);
           };
         })

namespace {

struct Routing {
  In x, expert_idx;
  Maybe scale, offset;
  int64_t first, last;  // experts of this device: [first, last)
  int64_t count_kind, quant_mode, index_kind;
  bool counted;
  Out expanded_x, expanded_row_idx;
  MaybeOut counts, expanded_scale;
};

// Rows of the sorted order that belong to this device's experts, and the order itself.
struct Sorted {
  at::Tensor order, experts;
  int64_t rows;
};

Sorted sort_by_expert(const Routing& r) {
  const at::Tensor flat = r.expert_idx.reshape({-1}).to(at::kLong);
  const at::Tensor own = flat.ge(r.first).logical_and(flat.lt(r.last));
  const at::Tensor key =
      at::where(own, flat, at::scalar_tensor(std::numeric_limits<int64_t>::max(), at::kLong));
  const at::Tensor order = at::argsort(key, /*stable=*/true, -1, false);
  const int64_t rows = own.sum().item<int64_t>();
  return {order, flat.index_select(0, order.slice(0, 0, rows)), rows};
}

void set_row_index(const Routing& r, const Sorted& sorted) {
  if (r.index_kind == 1) {
    r.expanded_row_idx.slice(0, 0, sorted.rows).copy_(sorted.order.slice(0, 0, sorted.rows));
    return;
  }
  at::Tensor places = at::full_like(sorted.order, -1);
  places.index_copy_(0, sorted.order.slice(0, 0, sorted.rows), at::arange(sorted.rows));
  r.expanded_row_idx.set(places);
}

void set_counts(const Routing& r, const at::Tensor& experts) {
  if (!r.counted || !r.counts) return;
  const at::Tensor counts = at::bincount(experts - r.first, std::nullopt, r.last - r.first);
  if (r.count_kind == 2) {
    const at::Tensor present = at::nonzero(counts).flatten();
    at::Tensor pairs = at::zeros(r.counts->sizes(), at::kLong);
    pairs.slice(0, 0, present.numel())
        .copy_(at::stack({present + r.first, counts.index_select(0, present)}, 1));
    return r.counts->set(pairs);
  }
  r.counts->set(r.count_kind == 0 ? counts.cumsum(0) : counts);
}

// Writes the sorted rows; those after the last one of this device are undefined.
void set_rows(const Routing& r, const Sorted& sorted) {
  const int64_t k = r.expert_idx.size(1), rows = std::min(sorted.rows, r.expanded_x.size(0));
  if (r.expanded_x.is_floating_point()) {
    r.expanded_x.slice(0, rows).fill_(std::numeric_limits<double>::quiet_NaN());
  }
  const at::Tensor tokens = sorted.order.slice(0, 0, rows).div(k, "floor");
  const at::Tensor chosen = r.x.index_select(0, tokens), target = r.expanded_x.slice(0, 0, rows);
  if (r.quant_mode == -1) {
    target.copy_(chosen);
    if (r.scale && r.expanded_scale) {
      r.expanded_scale->slice(0, 0, rows).copy_(r.scale->reshape({-1}).index_select(0, tokens));
    }
    return;
  }
  at::Tensor values = wide(chosen);
  if (r.quant_mode == 0) {
    values = values * wide(*r.scale).reshape({-1}) + wide(*r.offset).reshape({-1});
  } else {
    if (r.scale) {
      const at::Tensor own = (sorted.experts.slice(0, 0, rows) - r.first).clamp_max(r.scale->size(0) - 1);
      values = values * wide(*r.scale).index_select(0, own);
    }
    const at::Tensor step = values.abs().amax(-1, true) / 127;
    values = values / step.clamp_min(1e-30);
    r.expanded_scale->slice(0, 0, rows).copy_(step.flatten());
  }
  target.copy_(at::round(values).clamp(-128, 127));
}

// What the modes of quantisation demand of scale and offset.
void require_routing_scales(const Routing& r) {
  const int64_t experts = r.last - r.first;
  if (r.scale) r.scale->in({at::kFloat});
  if (r.offset) r.offset->in({at::kFloat});
  if (r.quant_mode == 0) {
    require(r.scale && r.offset, "scale", "static quantisation needs scale and offset");
    r.scale->shaped({1});
    r.offset->shaped({1});
  } else {
    require(!r.offset, "offset", "it belongs to static quantisation");
    if (r.scale && r.quant_mode == -1) r.scale->shaped({r.x.size(0)});
    if (r.scale && r.quant_mode == 1) {
      r.scale->shaped({r.scale->size(0) == 1 ? 1 : experts, r.x.size(1)});
    }
  }
}

void require_routing(const Routing& r, int64_t expert_num, int64_t drop_pad_mode) {
  r.x.in({at::kFloat, at::kHalf, at::kBFloat16, at::kChar}).rank(2, 2);
  r.expert_idx.in({at::kInt}).rank(2, 2);
  require(r.expert_idx.size(0) == r.x.size(0), "expertIdx", "it must have one row per row of x");
  require(drop_pad_mode == 0, "dropPadMode", "only 0 (no capacity) is supported");
  require(r.first >= 0 && r.first < r.last && r.last <= expert_num, "activeExpertRange",
          "it must lie in [0, expertNum]");
  require(r.quant_mode >= -1 && r.quant_mode <= 1, "quantMode",
          "it must be -1 (none), 0 (static) or 1 (dynamic)");
  require_routing_scales(r);
  require(r.count_kind >= 0 && r.count_kind <= 2, "expertTokensNumType", "it must be 0, 1 or 2");
  require(r.index_kind == 0 || r.index_kind == 1, "rowIdxType", "it must be 0 (gather) or 1 (scatter)");
  require(expert_num <= kMaxRoutedExperts, "expertNum", "it must not exceed 10240");
}

// What tensors hold: run it with the operator.
void require_within(const at::Tensor& values, int64_t end, std::string_view argument) {
  const bool fits = !values.numel() || (values.ge(0).all().item<bool>() && values.lt(end).all().item<bool>());
  require(fits, argument, "its elements must lie in [0, " + std::to_string(end) + ")");
}

// Each element is another one of [0, number of elements).
void require_permutation(const at::Tensor& places, std::string_view argument) {
  require_within(places, places.numel(), argument);
  const at::Tensor counts = at::bincount(places.flatten(), std::nullopt, places.numel());
  require(counts.le(1).all().item<bool>(), argument, "no element may be there twice");
}

}  // namespace

OPERATOR(aclnnMoeInitRoutingV3,
         (In x, In expertIdx, Maybe scale, Maybe offset, int64_t activeNum, int64_t expertCapacity,
          int64_t expertNum, int64_t dropPadMode, int64_t expertTokensNumType, bool expertTokensNumFlag,
          int64_t quantMode, Ints activeExpertRange, int64_t rowIdxType, Out expandedX, Out expandedRowIdx,
          MaybeOut expertTokensCountOrCumsum, MaybeOut expandedScale),
         {
           const bool ranged = activeExpertRange.size() == 2;
           const Routing r{x,
                           expertIdx,
                           scale,
                           offset,
                           ranged ? activeExpertRange[0] : 0,
                           ranged ? activeExpertRange[1] : expertNum,
                           expertTokensNumType,
                           quantMode,
                           rowIdxType,
                           expertTokensNumFlag,
                           expandedX,
                           expandedRowIdx,
                           expertTokensCountOrCumsum,
                           expandedScale};
           require_routing(r, expertNum, dropPadMode);
           return [=] {
             require_within(expertIdx, expertNum, "expertIdx");
             const Sorted sorted = sort_by_expert(r);
             set_rows(r, sorted);
             set_row_index(r, sorted);
             set_counts(r, sorted.experts);
           };
         })
OPERATOR(aclnnMoeTokenPermute,
         (In tokens, In indices, int64_t numOutTokens, bool paddedMode, Out permuteTokensOut,
          Out sortedIndicesOut),
         {
           tokens.rank(2, 2);
           indices.in(kIndices).rank(1, 2);
           require(!paddedMode, "paddedMode", "it is not supported");
           return [=] {
             const int64_t k = indices.dim() == 1 ? 1 : indices.size(1);
             const at::Tensor order = at::argsort(indices.reshape({-1}), /*stable=*/true, -1, false);
             const at::Tensor rows = order.slice(0, 0, permuteTokensOut.size(0)).div(k, "floor");
             permuteTokensOut.set(tokens.index_select(0, rows));
             sortedIndicesOut.set(at::argsort(order));
           };
         })
OPERATOR(aclnnMoeTokenUnpermute,
         (In permutedTokens, In sortedIndices, Maybe probs, bool paddedMode, Ints restoreShape, Out out), {
           permutedTokens.in(kFloats).rank(2, 2);
           sortedIndices.in({at::kInt}).rank(1, 1);
           out.like(permutedTokens);
           require(!paddedMode, "paddedMode", "it is not supported");
           if (probs) {
             probs->in(kFloats).rank(2, 2);
             require(probs->numel() == sortedIndices.numel(), "probs", "it must have one element per index");
             require(probs->size(1) <= kMaxUnpermutedChoices, "probs",
                     "more than 512 choices are not supported");
           }
           return [=] {
             const int64_t k = probs ? probs->size(1) : 1, tokens = sortedIndices.numel() / k;
             require_permutation(sortedIndices, "sortedIndices");
             const at::Tensor places = sortedIndices.to(at::kLong);
             // npu_moe_token_permute may leave out the last rows, which then add nothing
             const at::Tensor present = places.lt(permutedTokens.size(0));
             at::Tensor rows =
                 wide(permutedTokens.index_select(0, at::where(present, places, at::zeros_like(places))));
             rows = rows.masked_fill(present.logical_not().unsqueeze(1), 0).view({tokens, k, -1});
             if (probs) rows = rows * wide(*probs).unsqueeze(-1);
             out.set(rows.sum(1));
           };
         })

// Row i: the skip connections plus the scaled rows of its experts. Modes 2 and 3 number the places row by row,
// the others column by column.
OPERATOR(aclnnMoeFinalizeRoutingV2,
         (In expandedX, In expandedRowIdx, Maybe x1, Maybe x2, Maybe bias, Maybe scales, Maybe expertIdx,
          int64_t dropPadMode, Out out),
         {
           expandedX.in(kFloats).rank(2, 2);
           expandedRowIdx.in({at::kInt}).rank(1, 1);
           require(dropPadMode == 0 || dropPadMode == 2, "dropPadMode",
                   "only 0 and 2 (no capacity) are supported");
           require(!bias || expertIdx, "expertIdx", "a bias needs it");
           require(!x2 || x1, "x2", "it needs x1");
           if (scales) scales->like(expandedX);
           return [=] {
             require_within(expandedRowIdx, expandedRowIdx.numel(), "expandedRowIdx");
             const int64_t tokens = out.size(0), k = expandedRowIdx.size(0) / tokens;
             const at::Tensor flat = expandedRowIdx.to(at::kLong);
             const at::Tensor places = dropPadMode == 2 ? flat.view({tokens, k}) : flat.view({k, tokens}).t();
             at::Tensor rows = wide(expandedX.index_select(0, places.reshape({-1}))).view({tokens, k, -1});
             if (bias)
               rows = rows + wide(*bias).index_select(0, expertIdx->reshape({-1}).to(at::kLong)).view_as(rows);
             if (scales) rows = rows * wide(*scales).unsqueeze(-1);
             at::Tensor sum = rows.sum(1);
             if (x1) sum = sum + wide(*x1);
             if (x2) sum = sum + wide(*x2);
             out.set(sum);
           };
         })
