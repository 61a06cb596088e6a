// What is between the projection of queries, keys and values and attention, for a step's tokens:
// root-mean-square norms of each head (Qwen3), rotary positions in GPT-NeoX's pairs, and the write of keys and
// values into their KV slots. Each element is read and written once, and rounded once.
//
// Counted by the host shim: (N + 2K) * D elements in, as many out, and the token's angles. On a 910B (1.2 TB/s,
// 40 vector cores) that is 5 µs for 256 tokens of 32 heads on 8 of 128, two thirds less than one operator after
// another moves.
#pragma once

#include "npu/common/device.h"
#include "npu/norm_rope_store/params.h"

namespace ascend_npu {

// `NormRopeStoreTensors` as the device has them.
struct NormRopeStoreAddresses {
  GM_ADDR query;
  GM_ADDR key;
  GM_ADDR value;
  GM_ADDR query_weight;
  GM_ADDR key_weight;
  GM_ADDR positions;
  GM_ADDR cos_sin;
  GM_ADDR slots;
  GM_ADDR query_out;
  GM_ADDR key_cache;
  GM_ADDR value_cache;
  GM_ADDR kept_keys;
  GM_ADDR kept_values;
};

template <class T>
class NormRopeStore {
 public:
  __aicore__ inline NormRopeStore(const NormRopeStoreParams& params, const NormRopeStoreAddresses& addresses)
      : params_(params), addresses_(addresses) {
    size_ = params.head_size;
    heads_ = params.heads + params.kv_heads;
    queries_ = params.heads * size_;
    keys_ = params.kv_heads * size_;
    const int32_t all = queries_ + 2 * keys_, padded = round_up(heads_, kBlockLanes);
    pipe_.InitBuffer(in_, 2, all * sizeof(T));
    pipe_.InitBuffer(angles_in_, 2, params.rotated * sizeof(float));
    pipe_.InitBuffer(out_, 2, all * sizeof(T));
    pipe_.InitBuffer(rows_buffer_, (queries_ + keys_) * sizeof(float));
    pipe_.InitBuffer(first_buffer_, padded * kLanes * sizeof(float));
    pipe_.InitBuffer(second_buffer_, padded * kLanes * sizeof(float));
    pipe_.InitBuffer(sums_buffer_, padded * sizeof(float));
    pipe_.InitBuffer(factors_buffer_, padded * kBlockLanes * sizeof(float));
    pipe_.InitBuffer(weights_buffer_, 2 * size_ * sizeof(float));
    pipe_.InitBuffer(raw_buffer_, size_ * sizeof(T));
    rows_ = rows_buffer_.template Get<float>();
    first_ = first_buffer_.template Get<float>();
    second_ = second_buffer_.template Get<float>();
    sums_ = sums_buffer_.template Get<float>();
    factors_ = factors_buffer_.template Get<float>();
    weights_ = weights_buffer_.template Get<float>();
    if (params.norms != 0) {
      load_weight(addresses.query_weight, weights_);
      load_weight(addresses.key_weight, weights_[size_]);
      // the rows of a broadcast are whole groups of eight
      Duplicate(sums_, 1.0f, padded);
      PipeBarrier<PIPE_V>();
    }
  }

  // A core takes every GetBlockNum()-th token; the next one is copied in while the current one is computed.
  __aicore__ inline void process() {
    int32_t token = GetBlockIdx();
    if (token < params_.tokens) load(token);
    for (; token < params_.tokens; token += GetBlockNum()) {
      auto loaded = in_.template DeQue<T>();
      auto angles = angles_in_.template DeQue<float>();
      if (token + GetBlockNum() < params_.tokens) load(token + GetBlockNum());
      auto result = out_.template AllocTensor<T>();
      Cast(rows_, loaded, RoundMode::CAST_NONE, queries_ + keys_);
      DataCopy(result[queries_ + keys_], loaded[queries_ + keys_], keys_);
      PipeBarrier<PIPE_V>();
      in_.FreeTensor(loaded);
      if (params_.norms != 0) normalise();
      rotate(angles);
      angles_in_.FreeTensor(angles);
      Cast(result, rows_, RoundMode::CAST_RINT, queries_ + keys_);
      PipeBarrier<PIPE_V>();
      out_.EnQue(result);
      store(token);
    }
  }

 private:
  __aicore__ inline void load_weight(GM_ADDR from, const LocalTensor<float>& weight) {
    const auto raw = raw_buffer_.template Get<T>();
    DataCopy(raw, global<T>(from), size_);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    Cast(weight, raw, RoundMode::CAST_NONE, size_);
    SetFlag<HardEvent::V_MTE2>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE2>(EVENT_ID0);
  }

  __aicore__ inline void load(int32_t token) {
    auto loading = in_.template AllocTensor<T>();
    const int64_t number = token;
    DataCopy(loading, global<T>(addresses_.query)[number * params_.query_stride], queries_);
    DataCopy(loading[queries_], global<T>(addresses_.key)[number * params_.key_stride], keys_);
    DataCopy(loading[queries_ + keys_], global<T>(addresses_.value)[number * params_.value_stride], keys_);
    in_.EnQue(loading);
    auto angles = angles_in_.template AllocTensor<float>();
    const int64_t position = global<int64_t>(addresses_.positions).GetValue(token);
    DataCopy(angles, global<float>(addresses_.cos_sin)[position * params_.rotated], params_.rotated);
    angles_in_.EnQue(angles);
  }

  // Every head divided by the root of its mean square and multiplied with the weight.
  __aicore__ inline void normalise() {
    const int32_t stride = size_ / kBlockLanes;
    for (int32_t begin = 0; begin < size_; begin += kLanes) {
      const int32_t lanes = smaller(kLanes, size_ - begin);
      const BinaryRepeatParams strides(1, 1, 1, kLanes / kBlockLanes, stride, stride);
      if (begin == 0)
        Mul(first_, rows_, rows_, lanes, heads_, strides);
      else
        MulAddDst(first_, rows_[begin], rows_[begin], lanes, heads_, strides);
      PipeBarrier<PIPE_V>();
    }
    WholeReduceSum(sums_, first_, smaller(kLanes, size_), heads_, 1, 1, kLanes / kBlockLanes);
    PipeBarrier<PIPE_V>();
    Muls(sums_, sums_, 1.0f / static_cast<float>(size_), heads_);
    PipeBarrier<PIPE_V>();
    Adds(sums_, sums_, params_.epsilon, heads_);
    PipeBarrier<PIPE_V>();
    Sqrt(sums_, sums_, heads_);
    PipeBarrier<PIPE_V>();
    Brcb(factors_, sums_, round_up(heads_, kBlockLanes) / kBlockLanes, BrcbRepeatParams(1, kBlockLanes));
    PipeBarrier<PIPE_V>();
    divide_rows(rows_, factors_, heads_, size_);
    for (int32_t begin = 0; begin < size_; begin += kLanes) {
      const int32_t lanes = smaller(kLanes, size_ - begin);
      const BinaryRepeatParams strides(1, 1, 1, stride, stride, 0);
      Mul(rows_[begin], rows_[begin], weights_[begin], lanes, params_.heads, strides);
      const auto keys = rows_[queries_ + begin];
      Mul(keys, keys, weights_[size_ + begin], lanes, params_.kv_heads, strides);
    }
    PipeBarrier<PIPE_V>();
  }

  // Pairs (a, b), F/2 apart, become (a cos - b sin, b cos + a sin). angles: cosines of the F/2 pairs, then
  // sines.
  __aicore__ inline void rotate(const LocalTensor<float>& angles) {
    const int32_t half_width = params_.rotated / 2, stride = size_ / kBlockLanes;
    constexpr int32_t kStride = kLanes / kBlockLanes;
    for (int32_t begin = 0; begin < half_width; begin += kLanes) {
      const int32_t lanes = smaller(kLanes, half_width - begin);
      const auto a = rows_[begin], b = rows_[half_width + begin];
      const auto cosines = angles[begin], sines = angles[half_width + begin];
      const BinaryRepeatParams into(1, 1, 1, kStride, stride, 0), inside(1, 1, 1, stride, stride, 0),
          from(1, 1, 1, stride, stride, kStride);
      Mul(first_, a, sines, lanes, heads_, into);
      Mul(second_, b, sines, lanes, heads_, into);
      PipeBarrier<PIPE_V>();
      Mul(a, a, cosines, lanes, heads_, inside);
      Mul(b, b, cosines, lanes, heads_, inside);
      PipeBarrier<PIPE_V>();
      Sub(a, a, second_, lanes, heads_, from);
      Add(b, b, first_, lanes, heads_, from);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void store(int32_t token) {
    auto ready = out_.template DeQue<T>();
    const int64_t number = token, slot = global<int64_t>(addresses_.slots).GetValue(token);
    const auto keys = ready[queries_], values = ready[queries_ + keys_];
    DataCopy(global<T>(addresses_.query_out)[number * queries_], ready, queries_);
    if (slot >= 0) {
      DataCopy(global<T>(addresses_.key_cache)[slot * keys_], keys, keys_);
      DataCopy(global<T>(addresses_.value_cache)[slot * keys_], values, keys_);
    }
    if (params_.keeps_keys != 0) {
      DataCopy(global<T>(addresses_.kept_keys)[number * keys_], keys, keys_);
      DataCopy(global<T>(addresses_.kept_values)[number * keys_], values, keys_);
    }
    out_.FreeTensor(ready);
  }

  NormRopeStoreParams params_;
  NormRopeStoreAddresses addresses_;
  int32_t size_, heads_, queries_, keys_;  // head size; heads of queries and keys; elements of a token's
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_, angles_in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> rows_buffer_, first_buffer_, second_buffer_, sums_buffer_, factors_buffer_,
      weights_buffer_, raw_buffer_;
  LocalTensor<float> rows_, first_, second_, sums_, factors_, weights_;
};

}  // namespace ascend_npu
