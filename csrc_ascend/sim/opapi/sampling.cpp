// npu_top_k_top_p: filters logits before a token is drawn.
#include "sim/opapi/aten.h"
#include "sim/opapi/table.h"

namespace ascend_sim {
namespace {

void require_k(const In& k, int64_t vocabulary) {
  if (k.numel() == 0) return;
  const int64_t low = k.min().item<int64_t>(), high = k.max().item<int64_t>();
  const int64_t most = std::min<int64_t>(1024, vocabulary);
  require(low >= 1 && high <= most, "k",
          std::to_string(low < 1 ? low : high) + " is outside [1, " + std::to_string(most) + "]");
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
    if (k) require_k(*k, logits.size(1));
    if (p) require_p(*p);
    auto [values, order] = logits.sort(true, -1, false);
    at::Tensor sorted = values.to(at::kFloat);
    if (k) {
      const at::Tensor threshold = sorted.gather(1, (logits.size(1) - k->to(at::kLong)).unsqueeze(1));
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
