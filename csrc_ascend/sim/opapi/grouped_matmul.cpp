// Products of groups of rows with a weight per group, plain or quantised.
#include <limits>

#include "sim/opapi/quantized.h"
#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

struct Grouped {
  InList x;
  WeightList weight;
  MaybeList bias, scale, antiquant_scale, antiquant_offset, per_token_scale;
  Maybe group_list;
  int64_t split_item, group_type, group_list_type, act_type;
  OutList out;
};

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

bool present(const MaybeList& list) { return !list.empty() && list[0] && list[0]->numel(); }

constexpr int64_t kMaxGroups = 1024, kLastAxisEnd = 65536;

// The dtypes of the result that go with a scale. A float32 scale for bfloat16 takes a weight in FRACTAL_NZ.
void require_scale(const Grouped& g) {
  const bool fractal = g.weight[0].format == ACL_FORMAT_FRACTAL_NZ;
  const In& scale = *g.scale[0];
  switch (g.out[0].scalar_type()) {
    case at::kBFloat16:
      scale.in(fractal ? Dtypes{at::kBFloat16, at::kFloat} : Dtypes{at::kBFloat16});
      break;
    case at::kHalf:
      scale.in({at::kFloat});
      break;
    case at::kChar:
      scale.in({at::kLong});
      break;
    default:
      require(false, "out", "a scale goes with float16, bfloat16 and int8");
  }
}

// int8 rows: a scale per column of each group, perhaps one per row; sums are in int32, and so is the bias.
void require_int8(const Grouped& g) {
  require_scale(g);
  g.x[0].in({at::kChar});
  g.weight[0].in({at::kChar});
  if (present(g.bias)) g.bias[0]->in({at::kInt});
  if (!present(g.per_token_scale)) return;
  require(g.out[0].scalar_type() != at::kChar, "out", "int8 does not go with scales per token");
  g.per_token_scale[0]->in({at::kFloat});
  if (g.x.size() == 1) g.per_token_scale[0]->shaped({g.x[0].size(0)});
}

// Rows that are not quantised, weights that are: scales of columns, or of groups of inputs if they have 4 bits.
void require_weight_only(const Grouped& g) {
  const In &x = g.x[0].in(kHalfs), &scale = g.antiquant_scale[0]->like(x);
  const Weight& weight = g.weight[0];
  weight.in({at::kChar, at::kInt});
  g.out[0].like(x);
  if (present(g.bias)) g.bias[0]->in({x.scalar_type() == at::kBFloat16 ? at::kFloat : at::kHalf});
  const bool packed = weight.scalar_type() == at::kInt;
  require(!packed || present(g.antiquant_offset), "antiquantOffset", "weights of 4 bits need it");
  if (present(g.antiquant_offset)) g.antiquant_offset[0]->like(x).shaped(scale.sizes());
  if (weight.dim() != 3) return;
  const int64_t columns = g.out[0].size(-1);
  if (scale.dim() == 3 && packed) {
    scale.shaped({weight.size(0), scale.size(1), columns});
    require(x.size(-1) % scale.size(1) == 0, "antiquantScale", "its groups must divide the inputs");
  } else {
    scale.shaped({weight.size(0), columns});
  }
}

// One tensor of rows, one stack of weights [groups, inputs, outputs], possibly a transposed view.
void require_stack(const Grouped& g) {
  const In& x = g.x[0].rank(2, 2);
  const Weight& weight = g.weight[0];
  weight.rank(3, 3);
  const int64_t groups = g.group_list->size(0);
  require(groups <= kMaxGroups, "groupList", "more than 1024 groups are not supported");
  require(weight.size(0) == groups, "groupList", "it must have one element per weight");
  // eight values of four bits are one element
  const bool packed = weight.scalar_type() == at::kInt;
  require(packed || weight.size(1) == x.size(1), "weight", "it must have as many inputs as x has columns");
  const int64_t last = weight.stride(2) == 1 ? weight.size(2) : weight.size(1);
  require(x.size(1) < kLastAxisEnd, "x", "its last axis must be below 65536");
  require(last < kLastAxisEnd, "weight", "its last axis must be below 65536");
  require(x.stride(1) == 1 || x.size(1) == 1, "x", "it must not be transposed");
  if (weight.format == ACL_FORMAT_FRACTAL_NZ) {
    require(weight.scalar_type() != at::kFloat, "weight", "float32 is not supported in FRACTAL_NZ");
    require(g.group_list_type == 0 || groups > 1, "groupList", "counts of a single group are not supported");
  }
}

void require_grouped(const Grouped& g) {
  require(!g.x.empty() && !g.weight.empty() && !g.out.empty(), "x", "x, weight and out need a tensor each");
  require(g.group_type == -1 || g.group_type == 0, "groupType", "only -1 (none) and 0 (rows) are supported");
  require(g.split_item >= 0 && g.split_item <= 3, "splitItem", "it must be 0 to 3");
  require(g.group_list_type == 0 || g.group_list_type == 1, "groupListType",
          "it must be 0 (ends) or 1 (counts)");
  require(g.act_type == 0, "actType", "activations are not supported");
  for (const In& x : g.x) x.in({at::kFloat, at::kHalf, at::kBFloat16, at::kChar}).rank(2, 6);
  for (const Weight& weight : g.weight) {
    weight.in({at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kInt}).rank(2, 3);
    const bool quantised = present(g.scale) || present(g.antiquant_scale);
    if (!quantised) weight.like(g.x[0]);
  }
  require(g.x[0].scalar_type() != at::kChar || present(g.scale), "scale", "int8 rows need it");
  if (g.group_type == 0) {
    require(g.group_list.has_value(), "groupList", "rows can only be grouped with it");
    g.group_list->in({at::kLong}).rank(1, 1);
    if (g.x.size() == 1 && g.weight.size() == 1) require_stack(g);
  }
  if (present(g.scale)) require_int8(g);
  if (present(g.antiquant_scale)) require_weight_only(g);
}

at::Tensor group_part(const MaybeList& list, int64_t group) {
  const In& first = *list[0];
  if (list.size() > 1) return *list.at(static_cast<size_t>(group));
  return first.dim() > 1 ? first.select(0, group) : static_cast<const at::Tensor&>(first);
}

// rows times the group's matrix; `first_row` tells which per-token scales are the rows'.
at::Tensor group_product(const Grouped& g, int64_t group, const at::Tensor& rows, const at::Tensor& matrix,
                         int64_t first_row) {
  if (present(g.scale)) {
    at::Tensor sums = at::matmul(rows.to(at::kDouble), matrix.to(at::kDouble));
    if (present(g.bias)) sums = sums + group_part(g.bias, group).to(at::kDouble);
    sums = sums * scale_values(group_part(g.scale, group)).to(at::kDouble);
    if (!present(g.per_token_scale)) return sums;
    return sums *
           g.per_token_scale[0]->reshape({-1}).slice(0, first_row, first_row + rows.size(0)).unsqueeze(1);
  }
  at::Tensor values = wide(matrix);
  if (present(g.antiquant_scale)) {
    // of columns, or of groups of inputs
    const auto spread = [&](const MaybeList& list) {
      const at::Tensor part = wide(group_part(list, group));
      return part.dim() == 2 ? part.repeat_interleave(matrix.size(0) / part.size(0), 0) : part;
    };
    if (present(g.antiquant_offset)) values = values + spread(g.antiquant_offset);
    values = values * spread(g.antiquant_scale);
  }
  const at::Tensor result = at::matmul(wide(rows), values);
  return present(g.bias) ? result + wide(group_part(g.bias, group)) : result;
}

// Ends of the groups within the rows.
std::vector<int64_t> group_ends(const Grouped& g, int64_t rows) {
  const at::Tensor listed = g.group_list->to(at::kLong);
  const at::Tensor ends = (g.group_list_type == 1 ? listed.cumsum(0) : listed).contiguous();
  const std::vector<int64_t> values(ends.const_data_ptr<int64_t>(),
                                    ends.const_data_ptr<int64_t>() + ends.numel());
  for (size_t i = 0; i < values.size(); ++i) {
    require(values[i] >= (i ? values[i - 1] : 0) && values[i] <= rows, "groupList",
            "its ends must not decrease nor exceed the " + std::to_string(rows) + " rows of x");
  }
  return values;
}

void by_rows(const Grouped& g) {
  const In& x = g.x[0];
  const std::vector<int64_t> ends = group_ends(g, x.size(0));
  const bool one_weight = g.weight.size() == 1;
  const at::Tensor all = one_weight ? int8_values(g.weight[0], g.weight[0].nd()) : at::Tensor();
  int64_t start = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const int64_t group = static_cast<int64_t>(i);
    const at::Tensor matrix = one_weight ? (all.dim() == 3 ? all.select(0, group) : all)
                                         : int8_values(g.weight.at(i), g.weight.at(i).nd());
    const at::Tensor result = group_product(g, group, x.slice(0, start, ends[i]), matrix, start);
    if (g.split_item >= 2) {
      g.out[0].slice(0, start, ends[i]).copy_(result);
    } else {
      g.out.at(i).set(result);
    }
    start = ends[i];
  }
  // rows that no group has are undefined
  if (g.split_item >= 2 && g.out[0].is_floating_point()) {
    g.out[0].slice(0, start).fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

void one_by_one(const Grouped& g) {
  for (size_t i = 0; i < g.x.size(); ++i) {
    const at::Tensor matrix = int8_values(g.weight.at(i), g.weight.at(i).nd());
    g.out.at(i).set(group_product(g, static_cast<int64_t>(i), g.x[i], matrix, 0));
  }
}

Work grouped_matmul(Grouped g) {
  require_grouped(g);
  return [g = std::move(g)] { g.group_type == 0 ? by_rows(g) : one_by_one(g); };
}

}  // namespace

OPERATOR(aclnnGroupedMatmulV4,
         (InList x, WeightList weight, MaybeList bias, MaybeList scale, MaybeList offset,
          MaybeList antiquantScale, MaybeList antiquantOffset, MaybeList perTokenScale, Maybe groupList,
          MaybeList activationInput, MaybeList activationQuantScale, MaybeList activationQuantOffset,
          int64_t splitItem, int64_t groupType, int64_t groupListType, int64_t actType, OutList out,
          MaybeList activationFeatureOut, MaybeList dynQuantScaleOut),
         {
           return grouped_matmul({x, weight, bias, scale, antiquantScale, antiquantOffset, perTokenScale,
                                  groupList, splitItem, groupType, groupListType, actType, out});
         })
OPERATOR(aclnnGroupedMatmulV5,
         (InList x, WeightList weight, MaybeList bias, MaybeList scale, MaybeList offset,
          MaybeList antiquantScale, MaybeList antiquantOffset, MaybeList perTokenScale, Maybe groupList,
          MaybeList activationInput, MaybeList activationQuantScale, MaybeList activationQuantOffset,
          int64_t splitItem, int64_t groupType, int64_t groupListType, int64_t actType, Ints tuningConfig,
          OutList out, MaybeList activationFeatureOut, MaybeList dynQuantScaleOut),
         {
           return grouped_matmul({x, weight, bias, scale, antiquantScale, antiquantOffset, perTokenScale,
                                  groupList, splitItem, groupType, groupListType, actType, out});
         })
OPERATOR(aclnnGroupedMatmulWeightNz,
         (InList x, WeightList weight, MaybeList bias, MaybeList scale, MaybeList offset,
          MaybeList antiquantScale, MaybeList antiquantOffset, MaybeList perTokenScale, Maybe groupList,
          MaybeList activationInput, MaybeList activationQuantScale, MaybeList activationQuantOffset,
          int64_t splitItem, int64_t groupType, int64_t groupListType, int64_t actType, Ints tuningConfig,
          int64_t quantGroupSize, OutList out, MaybeList activationFeatureOut, MaybeList dynQuantScaleOut),
         {
           return grouped_matmul({x, weight, bias, scale, antiquantScale, antiquantOffset, perTokenScale,
                                  groupList, splitItem, groupType, groupListType, actType, out});
         })
