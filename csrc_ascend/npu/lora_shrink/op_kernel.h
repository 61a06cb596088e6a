// The first half of LoRA for a batch of adapters: y[t] = scale * A[adapter of t] x[t]; unchanged for tokens
// without one. A core computes some ranks of 8 to 32 tokens; it reads an adapter's rows once for all tokens of
// the adapter.
//
// Expected on a 910B (1.2 TB/s, 40 vector cores), rank 16, 4,096 inputs, 64 tokens on 8 adapters, with
// lora_expand to 4,096 outputs: 5.4 MB and 4.5 µs, counted by the host shim.
#pragma once

#include "npu/common/adapter_runs.h"
#include "npu/lora_shrink/params.h"

namespace ascend_npu {

template <class T>
class LoraShrink {
 public:
  __aicore__ inline LoraShrink(const LoraShrinkParams& params, GM_ADDR x, GM_ADDR weights, GM_ADDR adapters,
                               GM_ADDR order, GM_ADDR y)
      : params_(params), runs_(adapters, order) {
    x_ = global<T>(x);
    weights_ = global<T>(weights);
    y_ = global<float>(y);
    const int32_t ranks = params.tile_ranks, hidden = params.tile_hidden;
    pipe_.InitBuffer(x_in_, 2, hidden * sizeof(T));
    pipe_.InitBuffer(weights_in_, 2, ranks * hidden * sizeof(T));
    pipe_.InitBuffer(out_, 2, ranks * sizeof(float));
    pipe_.InitBuffer(x_buffer_, hidden * sizeof(float));
    pipe_.InitBuffer(weights_buffer_, ranks * hidden * sizeof(float));
    pipe_.InitBuffer(products_buffer_, kRunTokens * ranks * kLanes * sizeof(float));
  }

  // A core takes every GetBlockNum()-th (tokens, tile of ranks).
  __aicore__ inline void process() {
    const int32_t tiles = ceil_div(params_.rank, params_.tile_ranks),
                  blocks = ceil_div(params_.tokens, params_.tile_tokens);
    for (int32_t item = GetBlockIdx(); item < blocks * tiles; item += GetBlockNum()) {
      const int32_t begin = item / tiles * params_.tile_tokens, first = item % tiles * params_.tile_ranks;
      const int32_t limit = smaller(begin + params_.tile_tokens, params_.tokens);
      for (int32_t position = begin, end; position < limit; position = end) {
        end = runs_.start(position, limit);
        if (runs_.adapter() >= 0)
          shrink(position, end, first, smaller(params_.tile_ranks, params_.rank - first));
      }
    }
  }

 private:
  // Tokens at positions position … end-1, all of the run's adapter.
  __aicore__ inline void shrink(int32_t position, int32_t end, int32_t first, int32_t count) {
    const auto products = products_buffer_.template Get<float>();
    Duplicate(products, 0.0f, (end - position) * count * kLanes);
    PipeBarrier<PIPE_V>();
    for (int32_t begin = 0; begin < params_.hidden; begin += params_.tile_hidden) {
      const int32_t width = smaller(params_.tile_hidden, params_.hidden - begin);
      load_weights((runs_.adapter() * params_.rank + first) * params_.hidden + begin, width, count);
      load_x(position, begin, width);
      const auto x = x_buffer_.template Get<float>(), weights = weights_buffer_.template Get<float>();
      auto loaded = weights_in_.template DeQue<T>();
      Cast(weights, loaded, RoundMode::CAST_NONE, count * width);
      weights_in_.FreeTensor(loaded);
      for (int32_t place = position; place < end; ++place) {
        if (place + 1 < end) load_x(place + 1, begin, width);
        auto loaded_x = x_in_.template DeQue<T>();
        Cast(x, loaded_x, RoundMode::CAST_NONE, width);
        x_in_.FreeTensor(loaded_x);
        PipeBarrier<PIPE_V>();
        multiply_rows(products[(place - position) * count * kLanes], weights, x, count, width, false);
      }
    }
    for (int32_t place = position; place < end; ++place) {
      auto result = out_.template AllocTensor<float>();
      WholeReduceSum(result, products[(place - position) * count * kLanes], kLanes, count, 1, 1,
                     kLanes / kBlockLanes);
      PipeBarrier<PIPE_V>();
      Muls(result, result, params_.scale, count);
      out_.EnQue(result);
      auto ready = out_.template DeQue<float>();
      DataCopyExtParams copy{};
      copy.blockCount = 1;
      copy.blockLen = count * sizeof(float);
      DataCopyPad(y_[runs_.token(place) * params_.rank + first], ready, copy);
      out_.FreeTensor(ready);
    }
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void load_x(int32_t position, int32_t begin, int32_t width) {
    auto x = x_in_.template AllocTensor<T>();
    DataCopy(x, x_[runs_.token(position) * params_.x_stride + begin], width);
    x_in_.EnQue(x);
  }

  __aicore__ inline void load_weights(int64_t weight, int32_t width, int32_t count) {
    auto weights = weights_in_.template AllocTensor<T>();
    DataCopyExtParams copy{};
    copy.blockCount = static_cast<uint16_t>(count);
    copy.blockLen = width * sizeof(T);
    copy.srcStride = (params_.hidden - width) * sizeof(T);
    DataCopyPad(weights, weights_[weight], copy, DataCopyPadExtParams<T>{});
    weights_in_.EnQue(weights);
  }

  LoraShrinkParams params_;
  AdapterRuns runs_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> x_in_, weights_in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> x_buffer_, weights_buffer_, products_buffer_;
  GlobalTensor<T> x_, weights_;
  GlobalTensor<float> y_;
};

}  // namespace ascend_npu
