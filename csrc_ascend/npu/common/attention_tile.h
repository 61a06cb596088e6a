// Attention of a few queries to one KV head's keys, tile by tile, with an online softmax: the core of
// prefix_attention and decode_attention. All computation is in float.
//
// A query here is one head of one token. The queries of a tile share a KV head, so each tile of keys and values
// is loaded and converted once for all of them. Statistics of a query (its largest score, its sum) are stored
// eight times, as a block of 32 bytes, which the vector unit can broadcast along a row.
#pragma once

#include "npu/common/attention_params.h"
#include "npu/common/device.h"

namespace ascend_npu {

// Score of invisible keys, below all others; finite, so that the difference of two of them is not NaN.
constexpr float kHidden = -1.0e30f;

// Global memory of the inputs.
template <class T>
struct AttentionInputs {
  GlobalTensor<T> query, key_cache, value_cache;
  GlobalTensor<int32_t> block_table;
};

// The queries of a tile: numbers first … first+count-1 of a row's (token, head of the group) pairs.
struct QueryTile {
  int32_t row, kv_head, first, count;
  int32_t token;     // the row's first token in the query
  int32_t position;  // of that token
};

template <class T>
class AttentionTile {
 public:
  // out_bytes: buffer size of a copy out.
  __aicore__ inline AttentionTile(const AttentionParams& params, const AttentionInputs<T>& inputs,
                                  int32_t out_bytes)
      : params_(params), inputs_(inputs), group_(params.heads / params.kv_heads) {
    const int32_t keys = params.tile_keys, queries = params.tile_queries, size = params.head_size;
    const int32_t statistics = queries * kBlockLanes;
    pipe_.InitBuffer(in_, 2, larger(keys, queries) * size * sizeof(T));
    pipe_.InitBuffer(out_, 2, out_bytes);
    pipe_.InitBuffer(rows_buffer_, keys * size * sizeof(float));
    pipe_.InitBuffer(products_buffer_, larger(keys, queries) * kLanes * sizeof(float));
    pipe_.InitBuffer(queries_buffer_, queries * size * sizeof(float));
    pipe_.InitBuffer(sums_buffer_, queries * size * sizeof(float));
    pipe_.InitBuffer(scores_buffer_, queries * keys * sizeof(float));
    pipe_.InitBuffer(weights_buffer_, keys * kBlockLanes * sizeof(float));
    pipe_.InitBuffer(numbers_buffer_, keys * sizeof(float));
    pipe_.InitBuffer(mask_buffer_, 32);
    pipe_.InitBuffer(statistics_buffer_, (4 * statistics + queries) * sizeof(float));
    rows_ = rows_buffer_.template Get<float>();
    products_ = products_buffer_.template Get<float>();
    queries_ = queries_buffer_.template Get<float>();
    sums_ = sums_buffer_.template Get<float>();
    scores_ = scores_buffer_.template Get<float>();
    weights_ = weights_buffer_.template Get<float>();
    numbers_ = numbers_buffer_.template Get<float>();
    mask_ = mask_buffer_.template Get<uint8_t>();
    const auto all = statistics_buffer_.template Get<float>();
    largest_ = all;
    total_ = all[statistics];
    tile_ = all[2 * statistics];
    factor_ = all[3 * statistics];
    reduced_ = all[4 * statistics];
    ArithProgression(numbers_, 0.0f, 1.0f, keys);
    // memory behind a tile's tail is masked, but must be finite
    Duplicate(scores_, 0.0f, queries * keys);
    PipeBarrier<PIPE_V>();
  }

  // Attends to the keys at positions begin … end-1 that are visible to each query.
  __aicore__ inline void attend(const QueryTile& tile, int32_t begin, int32_t end) {
    start(tile);
    int32_t count;
    for (int32_t position = begin; position < end; position += count) {
      const int32_t offset = position % params_.block_size;
      count = smaller(smaller(params_.tile_keys, params_.block_size - offset), end - position);
      const int64_t block = inputs_.block_table.GetValue(static_cast<int64_t>(tile.row) * params_.max_blocks +
                                                         position / params_.block_size);
      const int64_t first = block * params_.cache.block + static_cast<int64_t>(offset) * params_.cache.token +
                            static_cast<int64_t>(tile.kv_head) * params_.cache.head;
      load_rows(inputs_.key_cache[first], count);
      load_rows(inputs_.value_cache[first], count);
      take_rows(count);
      score(tile, position, count);
      update_softmax();
      take_rows(count);
      for (int32_t query = 0; query < tile.count; ++query) {
        Brcb(weights_, scores_[query * params_.tile_keys], ceil_div(count, kBlockLanes),
             BrcbRepeatParams(1, kBlockLanes));
        PipeBarrier<PIPE_V>();
        add_weighted_rows(sums_[query * params_.head_size], products_, rows_, weights_, count,
                          params_.head_size);
      }
    }
  }

  // Divides by the sums of weights and writes the queries' heads; output: [T, N, D].
  __aicore__ inline void store(const QueryTile& tile, const GlobalTensor<T>& output) {
    const int32_t size = params_.head_size;
    scale_rows<true>(sums_, total_, tile.count, size);
    for (int32_t query = 0; query < tile.count; ++query) {
      auto result = out_.template AllocTensor<T>();
      Cast(result, sums_[query * size], RoundMode::CAST_RINT, size);
      out_.EnQue(result);
      auto ready = out_.template DeQue<T>();
      DataCopy(output[token_of(tile, query) * params_.heads * size + head_of(tile, query) * size], ready, size);
      out_.FreeTensor(ready);
    }
  }

  // Writes the partial result of a part of the keys: D sums of values, not normalised, then the largest score
  // and the sum of weights, eight times each. partials: [R, N, parts, D + 16] float.
  __aicore__ inline void store_partial(const QueryTile& tile, const GlobalTensor<float>& partials,
                                       int32_t part) {
    const int32_t size = params_.head_size, width = size + 2 * kBlockLanes;
    for (int32_t query = 0; query < tile.count; ++query) {
      auto result = out_.template AllocTensor<float>();
      Muls(result, sums_[query * size], 1.0f, size);
      Muls(result[size], largest_[query * kBlockLanes], 1.0f, kBlockLanes);
      Muls(result[size + kBlockLanes], total_[query * kBlockLanes], 1.0f, kBlockLanes);
      out_.EnQue(result);
      auto ready = out_.template DeQue<float>();
      const int64_t head = static_cast<int64_t>(tile.row) * params_.heads + head_of(tile, query);
      DataCopy(partials[(head * params_.max_parts + part) * width], ready, width);
      out_.FreeTensor(ready);
    }
    PipeBarrier<PIPE_V>();
  }

 private:
  __aicore__ inline int64_t token_of(const QueryTile& tile, int32_t query) const {
    return tile.token + (tile.first + query) / group_;
  }

  __aicore__ inline int32_t head_of(const QueryTile& tile, int32_t query) const {
    return tile.kv_head * group_ + (tile.first + query) % group_;
  }

  // The number of queries rounded up to eight, which instructions process at a time.
  __aicore__ inline void start(const QueryTile& tile) {
    const int32_t size = params_.head_size;
    padded_ = round_up(tile.count, kBlockLanes);
    auto loading = in_.template AllocTensor<T>();
    for (int32_t query = 0; query < tile.count; ++query)
      DataCopy(loading[query * size],
               inputs_.query[token_of(tile, query) * params_.query_stride + head_of(tile, query) * size], size);
    in_.EnQue(loading);
    auto loaded = in_.template DeQue<T>();
    Cast(queries_, loaded, RoundMode::CAST_NONE, tile.count * size);
    in_.FreeTensor(loaded);
    Duplicate(largest_, kHidden, padded_ * kBlockLanes);
    Duplicate(total_, 0.0f, padded_ * kBlockLanes);
    Duplicate(sums_, 0.0f, padded_ * size);
    PipeBarrier<PIPE_V>();
    Muls(queries_, queries_, params_.scale, tile.count * size);
    PipeBarrier<PIPE_V>();
  }

  // Loads a tile of keys or values into the queue, with contiguous heads.
  __aicore__ inline void load_rows(const GlobalTensor<T>& from, int32_t count) {
    auto loading = in_.template AllocTensor<T>();
    const KvStrides& strides = params_.cache;
    DataCopyExtParams copy{};
    copy.blockCount = static_cast<uint16_t>(count);
    copy.blockLen = strides.segment_length * sizeof(T);
    copy.srcStride = (strides.token - strides.segment_length) * sizeof(T);
    copy.dstStride = (params_.head_size - strides.segment_length) / kBlockHalves;
    for (int32_t segment = 0; segment * strides.segment_length < params_.head_size; ++segment)
      DataCopyPad(loading[segment * strides.segment_length],
                  from[static_cast<int64_t>(segment) * strides.segment], copy, DataCopyPadExtParams<T>{});
    in_.EnQue(loading);
  }

  __aicore__ inline void take_rows(int32_t count) {
    auto loaded = in_.template DeQue<T>();
    Cast(rows_, loaded, RoundMode::CAST_NONE, count * params_.head_size);
    in_.FreeTensor(loaded);
    PipeBarrier<PIPE_V>();
  }

  // Scores of keys at position … position+count-1; kHidden for keys that are not visible to a query.
  __aicore__ inline void score(const QueryTile& tile, int32_t position, int32_t count) {
    for (int32_t query = 0; query < tile.count; ++query) {
      const auto scores = scores_[query * params_.tile_keys];
      dot_rows(scores, products_, rows_, queries_[query * params_.head_size], count, params_.head_size);
      const int32_t own = tile.position + (tile.first + query) / group_ - position;
      const int32_t last = smaller(count - 1, own);
      if (last < params_.tile_keys - 1) hide(scores, static_cast<float>(last), CMPMODE::LE);
      if (params_.window > 0 && own >= params_.window)
        hide(scores, static_cast<float>(own - params_.window), CMPMODE::GT);
    }
  }

  // Keeps the scores whose index in the tile satisfies the comparison with the bound.
  __aicore__ inline void hide(const LocalTensor<float>& scores, float bound, CMPMODE mode) {
    CompareScalar(mask_, numbers_, bound, mode, params_.tile_keys);
    PipeBarrier<PIPE_V>();
    Select(scores, mask_, scores, kHidden, SELMODE::VSEL_TENSOR_SCALAR_MODE, params_.tile_keys);
    PipeBarrier<PIPE_V>();
  }

  // Turns scores into weights for all queries; earlier sums are rescaled to the new largest score.
  __aicore__ inline void update_softmax() {
    const int32_t stride = params_.tile_keys / kBlockLanes, statistics = padded_ * kBlockLanes;
    const bool is_wide = params_.tile_keys > kLanes;
    if (is_wide) {
      Max(products_, scores_, scores_[kLanes], kLanes, padded_,
          BinaryRepeatParams(1, 1, 1, kBlockLanes, stride, stride));
      PipeBarrier<PIPE_V>();
    }
    WholeReduceMax(reduced_, is_wide ? products_ : scores_, kLanes, padded_, 1, 1, kBlockLanes,
                   ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
    Brcb(tile_, reduced_, padded_ / kBlockLanes, BrcbRepeatParams(1, kBlockLanes));
    PipeBarrier<PIPE_V>();
    Max(tile_, largest_, tile_, statistics);
    PipeBarrier<PIPE_V>();
    Sub(factor_, largest_, tile_, statistics);
    PipeBarrier<PIPE_V>();
    Exp(factor_, factor_, statistics);
    Muls(largest_, tile_, 1.0f, statistics);
    PipeBarrier<PIPE_V>();
    for (int32_t begin = 0; begin < params_.tile_keys; begin += kLanes)
      Sub(scores_[begin], scores_[begin], largest_, kLanes, padded_,
          BinaryRepeatParams(1, 1, 0, stride, stride, 1));
    PipeBarrier<PIPE_V>();
    Exp(scores_, scores_, padded_ * params_.tile_keys);
    PipeBarrier<PIPE_V>();
    if (is_wide) {
      Add(products_, scores_, scores_[kLanes], kLanes, padded_,
          BinaryRepeatParams(1, 1, 1, kBlockLanes, stride, stride));
      PipeBarrier<PIPE_V>();
    }
    WholeReduceSum(reduced_, is_wide ? products_ : scores_, kLanes, padded_, 1, 1, kBlockLanes);
    PipeBarrier<PIPE_V>();
    Brcb(tile_, reduced_, padded_ / kBlockLanes, BrcbRepeatParams(1, kBlockLanes));
    Mul(total_, total_, factor_, statistics);
    PipeBarrier<PIPE_V>();
    Add(total_, total_, tile_, statistics);
    scale_rows<false>(sums_, factor_, padded_, params_.head_size);
  }

  AttentionParams params_;
  AttentionInputs<T> inputs_;
  int32_t group_;       // query heads of a KV head
  int32_t padded_ = 0;  // queries of the current tile, rounded up to eight
  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> rows_buffer_, products_buffer_, queries_buffer_, sums_buffer_, scores_buffer_,
      weights_buffer_, numbers_buffer_, mask_buffer_, statistics_buffer_;
  LocalTensor<float> rows_, products_, queries_, sums_, scores_, weights_, numbers_;
  LocalTensor<float> largest_, total_, tile_, factor_, reduced_;
  LocalTensor<uint8_t> mask_;
};

}  // namespace ascend_npu
