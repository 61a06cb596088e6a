// npu_top_k_top_p: filters logits before a token is drawn.
#include "sim/opapi/aten.h"
#include "sim/opapi/table.h"

namespace ascend_sim {
namespace {

// How many of the largest logits each row keeps. CANN 9 takes k outside of 1 to 1024 and k of the whole
// vocabulary as none; older releases do not take them.
at::Tensor kept(const In& k, int64_t vocabulary) {
  const at::Tensor wide = k.to(at::kLong);
  const int64_t most = std::min<int64_t>(1024, vocabulary);
  const at::Tensor outside = wide.lt(1).logical_or(wide.gt(most));
  if (cann() < 900 && outside.any().item<bool>()) {
    const int64_t found = wide.masked_select(outside)[0].item<int64_t>();
    require(false, "k", std::to_string(found) + " is outside [1, " + std::to_string(most) + "]");
  }
  return wide.masked_fill(outside, vocabulary);
}

void require_p(const In& p) {
  if (p.numel() == 0) return;
  const float low = p.min().to(at::kFloat).item<float>(), high = p.max().to(at::kFloat).item<float>();
  require(low >= 0 && high <= 1, "p", std::to_string(low < 0 ? low : high) + " is outside [0, 1]");
}

}  // namespace

OPERATOR(aclnnApplyTopKTopP, (In logits, Maybe p, Maybe k, Out out), {
  require(soc() != Soc::P310, "logits", "the operator does not exist on Ascend310P");
  logits.in(kFloats).rank(2, 2);
  require(p || k, "p", "p and k must not both be absent");
  if (p) p->like(logits).shaped({logits.size(0)});
  if (k) k->in({at::kInt}).shaped({logits.size(0)});
  out.like(logits).shaped(logits.sizes());
  return [=] {
    if (p) require_p(*p);
    auto [values, order] = logits.sort(true, -1, false);
    at::Tensor sorted = values.to(at::kFloat);
    if (k) {
      const int64_t vocabulary = logits.size(1);
      const at::Tensor threshold = sorted.gather(1, (vocabulary - kept(*k, vocabulary)).unsqueeze(1));
      sorted = sorted.masked_fill(sorted.lt(threshold), -INFINITY);
    }
    if (p) {
      const at::Tensor below = at::softmax(sorted, -1).cumsum(-1);
      const at::Tensor hidden = below.le(1 - p->to(at::kFloat).unsqueeze(1));
      hidden.select(1, -1).fill_(false);
      sorted = sorted.masked_fill(hidden, -INFINITY);
    }
    out.set(at::empty_like(sorted).scatter_(1, order, sorted));
  };
})

}  // namespace ascend_sim
