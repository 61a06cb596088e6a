// Writes the keys and values of a step into their slots of the paged cache; 16-bit elements of any kind.
#pragma once

#include "npu/common/device.h"
#include "npu/store_kv/params.h"

namespace ascend_npu {

class StoreKv {
 public:
  __aicore__ inline StoreKv(const StoreKvParams& params, GM_ADDR slots) : params_(params) {
    slots_ = global<int64_t>(slots);
    pipe_.InitBuffer(queue_, 2, params_.tile_tokens * params_.width * sizeof(half));
  }

  // A core takes every GetBlockNum()-th tile of tokens.
  __aicore__ inline void process(GM_ADDR from, int32_t from_stride, GM_ADDR cache) {
    const int32_t tiles = ceil_div(params_.tokens, params_.tile_tokens);
    for (int32_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
      const int32_t first = tile * params_.tile_tokens;
      move(global<half>(from), from_stride, global<half>(cache), first,
           smaller(params_.tile_tokens, params_.tokens - first));
    }
  }

 private:
  __aicore__ inline void move(const GlobalTensor<half>& from, int32_t from_stride,
                              const GlobalTensor<half>& cache, int32_t first, int32_t count) {
    auto loading = queue_.AllocTensor<half>();
    DataCopyExtParams whole{};
    whole.blockCount = static_cast<uint16_t>(count);
    whole.blockLen = params_.width * sizeof(half);
    whole.srcStride = (from_stride - params_.width) * sizeof(half);
    DataCopyPad(loading, from[static_cast<int64_t>(first) * from_stride], whole, DataCopyPadExtParams<half>{});
    queue_.EnQue(loading);
    auto loaded = queue_.DeQue<half>();
    DataCopyExtParams segments{};
    segments.blockCount = static_cast<uint16_t>(params_.segment_count);
    segments.blockLen = params_.segment_length * sizeof(half);
    segments.dstStride = (params_.segment_stride - params_.segment_length) * sizeof(half);
    for (int32_t token = 0; token < count; ++token) {
      const int64_t slot = slots_.GetValue(first + token);
      if (slot < 0) continue;
      const int64_t block = slot / params_.block_size, offset = slot - block * params_.block_size;
      DataCopyPad(cache[block * params_.block_stride + offset * params_.token_stride],
                  loaded[token * params_.width], segments);
    }
    queue_.FreeTensor(loaded);
  }

  StoreKvParams params_;
  TPipe pipe_;
  // copied in and out without computing anything
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> queue_;
  GlobalTensor<int64_t> slots_;
};

}  // namespace ascend_npu
