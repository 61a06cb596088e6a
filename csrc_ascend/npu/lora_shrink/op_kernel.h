// The first half of LoRA for a batch of adapters: y[t] = scale * A[adapter of t] x[t]; unchanged for tokens
// without one.
#pragma once

#include "npu/common/device.h"
#include "npu/lora_shrink/params.h"

namespace ascend_npu {

template <class T>
class LoraShrink {
 public:
  __aicore__ inline LoraShrink(const LoraShrinkParams& params, GM_ADDR x, GM_ADDR weights, GM_ADDR adapters,
                               GM_ADDR y)
      : params_(params) {
    x_ = global<T>(x);
    weights_ = global<T>(weights);
    adapters_ = global<int64_t>(adapters);
    y_ = global<float>(y);
    const int32_t ranks = params.tile_ranks, hidden = params.tile_hidden;
    pipe_.InitBuffer(x_in_, 2, hidden * sizeof(T));
    pipe_.InitBuffer(weights_in_, 2, ranks * hidden * sizeof(T));
    pipe_.InitBuffer(out_, 2, ranks * sizeof(float));
    pipe_.InitBuffer(x_buffer_, hidden * sizeof(float));
    pipe_.InitBuffer(weights_buffer_, ranks * hidden * sizeof(float));
    pipe_.InitBuffer(products_buffer_, ranks * kLanes * sizeof(float));
  }

  // A core takes every GetBlockNum()-th (token, tile of ranks).
  __aicore__ inline void process() {
    const int32_t tiles = ceil_div(params_.rank, params_.tile_ranks);
    for (int32_t item = GetBlockIdx(); item < params_.tokens * tiles; item += GetBlockNum()) {
      const int32_t token = item / tiles, first = item % tiles * params_.tile_ranks;
      const int64_t adapter = adapters_.GetValue(token);
      if (adapter < 0) continue;
      shrink(token, adapter, first, smaller(params_.tile_ranks, params_.rank - first));
    }
  }

 private:
  __aicore__ inline void shrink(int32_t token, int64_t adapter, int32_t first, int32_t count) {
    const auto products = products_buffer_.template Get<float>();
    Duplicate(products, 0.0f, count * kLanes);
    PipeBarrier<PIPE_V>();
    for (int32_t begin = 0; begin < params_.hidden; begin += params_.tile_hidden) {
      const int32_t width = smaller(params_.tile_hidden, params_.hidden - begin);
      load(token, (adapter * params_.rank + first) * params_.hidden + begin, begin, width, count);
      const auto x = x_buffer_.template Get<float>(), weights = weights_buffer_.template Get<float>();
      auto loaded_x = x_in_.template DeQue<T>();
      Cast(x, loaded_x, RoundMode::CAST_NONE, width);
      x_in_.FreeTensor(loaded_x);
      auto loaded = weights_in_.template DeQue<T>();
      Cast(weights, loaded, RoundMode::CAST_NONE, count * width);
      weights_in_.FreeTensor(loaded);
      PipeBarrier<PIPE_V>();
      multiply_rows(products, weights, x, count, width, false);
    }
    auto result = out_.template AllocTensor<float>();
    WholeReduceSum(result, products, kLanes, count, 1, 1, kLanes / kBlockLanes);
    PipeBarrier<PIPE_V>();
    Muls(result, result, params_.scale, count);
    out_.EnQue(result);
    auto ready = out_.template DeQue<float>();
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = count * sizeof(float);
    DataCopyPad(y_[static_cast<int64_t>(token) * params_.rank + first], ready, copy);
    out_.FreeTensor(ready);
  }

  __aicore__ inline void load(int32_t token, int64_t weight, int32_t begin, int32_t width, int32_t count) {
    auto x = x_in_.template AllocTensor<T>();
    DataCopy(x, x_[static_cast<int64_t>(token) * params_.x_stride + begin], width);
    x_in_.EnQue(x);
    auto weights = weights_in_.template AllocTensor<T>();
    DataCopyExtParams copy{};
    copy.blockCount = static_cast<uint16_t>(count);
    copy.blockLen = width * sizeof(T);
    copy.srcStride = (params_.hidden - width) * sizeof(T);
    DataCopyPad(weights, weights_[weight], copy, DataCopyPadExtParams<T>{});
    weights_in_.EnQue(weights);
  }

  LoraShrinkParams params_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> x_in_, weights_in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> x_buffer_, weights_buffer_, products_buffer_;
  GlobalTensor<T> x_, weights_;
  GlobalTensor<int64_t> adapters_;
  GlobalTensor<float> y_;
};

}  // namespace ascend_npu
