// Causal attention of prompt chunks to their rows' cached prefixes and to themselves.
#pragma once

#include "npu/common/attention_tile.h"

namespace ascend_npu {

template <class T>
class PrefixAttention {
 public:
  __aicore__ inline PrefixAttention(const AttentionParams& params, const AttentionInputs<T>& inputs,
                                    GM_ADDR query_start, GM_ADDR seq_lens, GM_ADDR output)
      : params_(params), tile_(params, inputs, params.head_size * sizeof(T)) {
    query_start_ = global<int32_t>(query_start);
    seq_lens_ = global<int32_t>(seq_lens);
    output_ = global<T>(output);
  }

  // work items (row, tile of queries, KV head) are distributed round-robin to the cores
  __aicore__ inline void process() {
    const int32_t group = params_.heads / params_.kv_heads;
    int32_t core_of_next = 0;
    for (int32_t row = 0; row < params_.rows; ++row) {
      const int32_t token = query_start_.GetValue(row), tokens = query_start_.GetValue(row + 1) - token;
      const int32_t position = seq_lens_.GetValue(row) - tokens;
      const int32_t items = ceil_div(tokens * group, params_.tile_queries) * params_.kv_heads;
      const int32_t first = (GetBlockIdx() - core_of_next + GetBlockNum()) % GetBlockNum();
      for (int32_t item = first; item < items; item += GetBlockNum()) {
        const int32_t query = item / params_.kv_heads * params_.tile_queries;
        run({row, item % params_.kv_heads, query, smaller(params_.tile_queries, tokens * group - query), token,
             position},
            group);
      }
      core_of_next = (core_of_next + items) % GetBlockNum();
    }
  }

 private:
  __aicore__ inline void run(const QueryTile& tile, int32_t group) {
    const int32_t oldest = tile.position + tile.first / group;
    const int32_t newest = tile.position + (tile.first + tile.count - 1) / group;
    const int32_t begin = params_.window > 0 ? larger(0, oldest - params_.window + 1) : 0;
    tile_.attend(tile, begin, newest + 1);
    tile_.store(tile, output_);
  }

  AttentionParams params_;
  AttentionTile<T> tile_;
  GlobalTensor<int32_t> query_start_, seq_lens_;
  GlobalTensor<T> output_;
};

}  // namespace ascend_npu
