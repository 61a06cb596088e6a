// The second half of LoRA for a batch of adapters: y[t] += B[adapter of t] x[t]; unchanged for tokens without
// one. The sum is rounded once, to y's type. A core computes some outputs of 32 tokens; it reads an adapter's
// rows once for all tokens of the adapter. Expected time: see lora_shrink.
#pragma once

#include "npu/common/adapter_runs.h"
#include "npu/lora_expand/params.h"

namespace ascend_npu {

template <class T>
class LoraExpand {
 public:
  __aicore__ inline LoraExpand(const LoraExpandParams& params, GM_ADDR x, GM_ADDR weights, GM_ADDR adapters,
                               GM_ADDR order, GM_ADDR y)
      : params_(params), runs_(adapters, order) {
    x_ = global<float>(x);
    weights_ = global<T>(weights);
    y_ = global<T>(y);
    const int32_t outputs = params.tile_outputs, rank = params.rank;
    pipe_.InitBuffer(x_in_, 2, rank * sizeof(float));
    pipe_.InitBuffer(weights_in_, 2, outputs * rank * sizeof(T));
    pipe_.InitBuffer(y_in_, 2, outputs * sizeof(T));
    pipe_.InitBuffer(out_, 2, outputs * sizeof(T));
    pipe_.InitBuffer(weights_buffer_, outputs * rank * sizeof(float));
    pipe_.InitBuffer(products_buffer_, outputs * kLanes * sizeof(float));
    pipe_.InitBuffer(sums_buffer_, 2 * outputs * sizeof(float));
  }

  // A core takes every GetBlockNum()-th (tokens, tile of outputs).
  __aicore__ inline void process() {
    const int32_t tiles = ceil_div(params_.outputs, params_.tile_outputs),
                  blocks = ceil_div(params_.tokens, kRunTokens);
    for (int32_t item = GetBlockIdx(); item < blocks * tiles; item += GetBlockNum()) {
      const int32_t begin = item / tiles * kRunTokens, first = item % tiles * params_.tile_outputs;
      const int32_t limit = smaller(begin + kRunTokens, params_.tokens);
      for (int32_t position = begin, end; position < limit; position = end) {
        end = runs_.start(position, limit);
        if (runs_.adapter() >= 0)
          expand(position, end, first, smaller(params_.tile_outputs, params_.outputs - first));
      }
    }
  }

 private:
  template <class E, class Queue>
  __aicore__ inline void load(Queue& queue, const GlobalTensor<E>& from, int32_t count) {
    auto loading = queue.template AllocTensor<E>();
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = count * sizeof(E);
    DataCopyPad(loading, from, copy, DataCopyPadExtParams<E>{});
    queue.EnQue(loading);
  }

  // Tokens at positions position … end-1, all of the run's adapter.
  __aicore__ inline void expand(int32_t position, int32_t end, int32_t first, int32_t count) {
    const int32_t rank = params_.rank;
    load(weights_in_, weights_[(runs_.adapter() * params_.outputs + first) * rank], count * rank);
    load(x_in_, x_[runs_.token(position) * rank], rank);
    const auto weights = weights_buffer_.template Get<float>(), sums = sums_buffer_.template Get<float>();
    const auto old = sums[params_.tile_outputs];
    auto loaded = weights_in_.template DeQue<T>();
    Cast(weights, loaded, RoundMode::CAST_NONE, count * rank);
    weights_in_.FreeTensor(loaded);
    for (int32_t place = position; place < end; ++place) {
      load(y_in_, outputs_of(place, first), count);
      if (place + 1 < end) load(x_in_, x_[runs_.token(place + 1) * rank], rank);
      auto loaded_y = y_in_.template DeQue<T>();
      Cast(old, loaded_y, RoundMode::CAST_NONE, count);
      y_in_.FreeTensor(loaded_y);
      PipeBarrier<PIPE_V>();
      auto x = x_in_.template DeQue<float>();
      dot_rows(sums, products_buffer_.template Get<float>(), weights, x, count, rank);
      x_in_.FreeTensor(x);
      Add(sums, sums, old, count);
      PipeBarrier<PIPE_V>();
      auto result = out_.template AllocTensor<T>();
      Cast(result, sums, RoundMode::CAST_RINT, count);
      PipeBarrier<PIPE_V>();
      out_.EnQue(result);
      auto ready = out_.template DeQue<T>();
      DataCopyExtParams copy{};
      copy.blockCount = 1;
      copy.blockLen = count * sizeof(T);
      DataCopyPad(outputs_of(place, first), ready, copy);
      out_.FreeTensor(ready);
    }
  }

  __aicore__ inline GlobalTensor<T> outputs_of(int32_t position, int32_t first) const {
    return y_[runs_.token(position) * params_.y_stride + params_.y_offset + first];
  }

  LoraExpandParams params_;
  AdapterRuns runs_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> x_in_, weights_in_, y_in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> weights_buffer_, products_buffer_, sums_buffer_;
  GlobalTensor<float> x_;
  GlobalTensor<T> weights_, y_;
};

}  // namespace ascend_npu
