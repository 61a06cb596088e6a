// Decode attention: one token of each row to the row's cached keys, which are split into parts of a fixed
// length so that a few long rows keep all vector cores busy; a second kernel merges the parts. The split does
// not depend on the batch, so neither does a row's result.
#pragma once

#include "npu/common/attention_tile.h"

namespace ascend_npu {

// Positions that a row's token attends to.
struct KeyRange {
  int32_t begin, end;
};

__aicore__ inline KeyRange keys_of(const AttentionParams& params, int32_t seq_len) {
  return {params.window > 0 ? larger(0, seq_len - params.window) : 0, seq_len};
}

template <class T>
class DecodeAttention {
 public:
  __aicore__ inline DecodeAttention(const AttentionParams& params, const AttentionInputs<T>& inputs,
                                    GM_ADDR seq_lens, GM_ADDR partials)
      : params_(params), tile_(params, inputs, (params.head_size + 2 * kBlockLanes) * sizeof(float)) {
    seq_lens_ = global<int32_t>(seq_lens);
    partials_ = global<float>(partials);
  }

  // work items (row, part, tile of heads, KV head) are distributed round-robin to the cores
  __aicore__ inline void process() {
    const int32_t group = params_.heads / params_.kv_heads, tiles = ceil_div(group, params_.tile_queries);
    int32_t core_of_next = 0;
    for (int32_t row = 0; row < params_.rows; ++row) {
      const int32_t seq_len = seq_lens_.GetValue(row);
      const KeyRange keys = keys_of(params_, seq_len);
      const int32_t items = ceil_div(keys.end - keys.begin, params_.split_keys) * tiles * params_.kv_heads;
      const int32_t first = (GetBlockIdx() - core_of_next + GetBlockNum()) % GetBlockNum();
      for (int32_t item = first; item < items; item += GetBlockNum()) {
        const int32_t part = item / params_.kv_heads / tiles;
        const int32_t query = item / params_.kv_heads % tiles * params_.tile_queries;
        const int32_t begin = keys.begin + part * params_.split_keys;
        const QueryTile tile{row,   item % params_.kv_heads,
                             query, smaller(params_.tile_queries, group - query),
                             row,   seq_len - 1};
        tile_.attend(tile, begin, smaller(keys.end, begin + params_.split_keys));
        tile_.store_partial(tile, partials_, part);
      }
      core_of_next = (core_of_next + items) % GetBlockNum();
    }
  }

 private:
  AttentionParams params_;
  AttentionTile<T> tile_;
  GlobalTensor<int32_t> seq_lens_;
  GlobalTensor<float> partials_;
};

// Merges the parts of each (row, head); rows without keys get zeros.
template <class T>
class MergeParts {
 public:
  __aicore__ inline MergeParts(const AttentionParams& params, GM_ADDR seq_lens, GM_ADDR partials,
                               GM_ADDR output)
      : params_(params) {
    const int32_t size = params.head_size;
    pipe_.InitBuffer(in_, 2, (size + 2 * kBlockLanes) * sizeof(float));
    pipe_.InitBuffer(out_, 2, size * sizeof(T));
    pipe_.InitBuffer(buffer_, (size + 5 * kBlockLanes) * sizeof(float));
    const auto all = buffer_.template Get<float>();
    sums_ = all;
    largest_ = all[size];
    total_ = all[size + kBlockLanes];
    new_largest_ = all[size + 2 * kBlockLanes];
    old_factor_ = all[size + 3 * kBlockLanes];
    factor_ = all[size + 4 * kBlockLanes];
    seq_lens_ = global<int32_t>(seq_lens);
    partials_ = global<float>(partials);
    output_ = global<T>(output);
  }

  __aicore__ inline void process() {
    for (int32_t head = GetBlockIdx(); head < params_.rows * params_.heads; head += GetBlockNum()) {
      const KeyRange keys = keys_of(params_, seq_lens_.GetValue(head / params_.heads));
      const int32_t parts = ceil_div(keys.end - keys.begin, params_.split_keys);
      Duplicate(sums_, 0.0f, params_.head_size);
      Duplicate(largest_, kHidden, kBlockLanes);
      Duplicate(total_, 0.0f, kBlockLanes);
      PipeBarrier<PIPE_V>();
      for (int32_t part = 0; part < parts; ++part) merge(static_cast<int64_t>(head) * params_.max_parts + part);
      if (parts > 0) scale_row<true>(sums_, total_);
      auto result = out_.template AllocTensor<T>();
      Cast(result, sums_, RoundMode::CAST_RINT, params_.head_size);
      out_.EnQue(result);
      auto ready = out_.template DeQue<T>();
      DataCopy(output_[static_cast<int64_t>(head) * params_.head_size], ready, params_.head_size);
      out_.FreeTensor(ready);
      PipeBarrier<PIPE_V>();
    }
  }

 private:
  // values[d] *= factor or /= factor, which is repeated eight times in its block.
  template <bool divides>
  __aicore__ inline void scale_row(const LocalTensor<float>& values, const LocalTensor<float>& factor) {
    scale_rows<divides>(values, factor, 1, params_.head_size);
  }

  __aicore__ inline void merge(int64_t partial) {
    const int32_t size = params_.head_size, width = size + 2 * kBlockLanes;
    auto loading = in_.template AllocTensor<float>();
    DataCopy(loading, partials_[partial * width], width);
    in_.EnQue(loading);
    auto loaded = in_.template DeQue<float>();
    const auto part_largest = loaded[size], part_total = loaded[size + kBlockLanes];
    Max(new_largest_, largest_, part_largest, kBlockLanes);
    PipeBarrier<PIPE_V>();
    Sub(old_factor_, largest_, new_largest_, kBlockLanes);
    Sub(factor_, part_largest, new_largest_, kBlockLanes);
    PipeBarrier<PIPE_V>();
    Exp(old_factor_, old_factor_, kBlockLanes);
    Exp(factor_, factor_, kBlockLanes);
    Muls(largest_, new_largest_, 1.0f, kBlockLanes);
    PipeBarrier<PIPE_V>();
    Mul(total_, total_, old_factor_, kBlockLanes);
    Mul(part_total, part_total, factor_, kBlockLanes);
    scale_row<false>(sums_, old_factor_);
    scale_row<false>(loaded, factor_);
    Add(total_, total_, part_total, kBlockLanes);
    Add(sums_, sums_, loaded, size);
    in_.FreeTensor(loaded);
    PipeBarrier<PIPE_V>();
  }

  AttentionParams params_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> buffer_;
  LocalTensor<float> sums_, largest_, total_, new_largest_, old_factor_, factor_;
  GlobalTensor<int32_t> seq_lens_;
  GlobalTensor<float> partials_;
  GlobalTensor<T> output_;
};

}  // namespace ascend_npu
