// Runs of tokens with the same adapter, so that a core reads an adapter once for all of them. Device code.
#pragma once

#include "npu/common/device.h"
#include "npu/common/run_tokens.h"

namespace ascend_npu {

class AdapterRuns {
 public:
  // adapters: [T] int64, of each token, negative: none; order: [T] int64, the tokens, best sorted by adapter.
  __aicore__ inline AdapterRuns(GM_ADDR adapters, GM_ADDR order) {
    adapters_ = global<int64_t>(adapters);
    order_ = global<int64_t>(order);
  }

  // Starts the run at a position of the order; returns its end, at most `limit`.
  __aicore__ inline int32_t start(int32_t position, int32_t limit) {
    adapter_ = adapters_.GetValue(token(position));
    int32_t end = position + 1;
    while (end < limit && adapters_.GetValue(token(end)) == adapter_) ++end;
    return end;
  }

  // Of the run; negative: none.
  __aicore__ inline int64_t adapter() const { return adapter_; }

  __aicore__ inline int64_t token(int32_t position) const { return order_.GetValue(position); }

 private:
  GlobalTensor<int64_t> adapters_, order_;
  int64_t adapter_ = -1;
};

}  // namespace ascend_npu
