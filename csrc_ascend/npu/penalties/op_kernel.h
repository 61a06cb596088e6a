// Repetition, frequency and presence penalties on logits, in place.
//
// The scalar unit counts the tokens of a row in a tile of the vocabulary; the vector unit applies the penalties
// to the tile. Tiles without tokens of the row, and rows without penalties, are not loaded.
#pragma once

#include "npu/common/device.h"
#include "npu/penalties/params.h"

namespace ascend_npu {

struct PenaltiesTensors {
  GlobalTensor<float> logits, repetition, frequency, presence;
  GlobalTensor<int32_t> token_ids, prompt_lens, seq_lens;
  GlobalTensor<int64_t> slots;
};

class Penalties {
 public:
  __aicore__ inline Penalties(const PenaltiesParams& params, const PenaltiesTensors& tensors)
      : params_(params), tensors_(tensors) {
    constexpr uint32_t bytes = kPenaltiesTile * sizeof(float);
    pipe_.InitBuffer(in_, 1, bytes);
    pipe_.InitBuffer(out_, 1, bytes);
    pipe_.InitBuffer(tokens_buffer_, kPenaltiesTokens * sizeof(int32_t));
    pipe_.InitBuffer(mask_buffer_, kPenaltiesTile / 8);
    pipe_.InitBuffer(seen_buffer_, bytes);
    pipe_.InitBuffer(counts_buffer_, bytes);
    pipe_.InitBuffer(logits_buffer_, bytes);
    pipe_.InitBuffer(divided_buffer_, bytes);
    pipe_.InitBuffer(multiplied_buffer_, bytes);
    seen_ = seen_buffer_.Get<float>();
    counts_ = counts_buffer_.Get<float>();
  }

  // A core takes every GetBlockNum()-th (row, tile of the vocabulary).
  __aicore__ inline void process() {
    const int32_t tiles = ceil_div(params_.vocab, kPenaltiesTile);
    for (int32_t item = GetBlockIdx(); item < params_.rows * tiles; item += GetBlockNum()) {
      const int32_t row = item / tiles, first = item % tiles * kPenaltiesTile;
      const float repetition = tensors_.repetition.GetValue(row), frequency = tensors_.frequency.GetValue(row),
                  presence = tensors_.presence.GetValue(row);
      if (repetition == 1.0f && frequency == 0.0f && presence == 0.0f) continue;
      const int32_t count = smaller(kPenaltiesTile, params_.vocab - first);
      if (!count_tokens(row, first, count)) continue;
      penalize(static_cast<int64_t>(row) * params_.logits_stride + first, count, repetition, frequency,
               presence);
    }
  }

 private:
  // Counts the row's tokens in the tile: seen_ is 1 for tokens of the sequence, counts_ their number in the
  // output. Returns whether there are any.
  __aicore__ inline bool count_tokens(int32_t row, int32_t first, int32_t count) {
    const int32_t length = smaller(tensors_.seq_lens.GetValue(row), params_.length);
    const int32_t prompt = tensors_.prompt_lens.GetValue(row);
    const int64_t begin = tensors_.slots.GetValue(row) * params_.length;
    const auto tokens = tokens_buffer_.Get<int32_t>();
    bool any = false;
    for (int32_t start = 0; start < length; start += kPenaltiesTokens) {
      const int32_t loaded = smaller(kPenaltiesTokens, length - start);
      DataCopyExtParams copy{};
      copy.blockCount = 1;
      copy.blockLen = loaded * sizeof(int32_t);
      DataCopyPad(tokens, tensors_.token_ids[begin + start], copy, DataCopyPadExtParams<int32_t>{});
      SetFlag<HardEvent::MTE2_S>(EVENT_ID0);
      WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
      for (int32_t index = 0; index < loaded; ++index) {
        const int32_t place = tokens.GetValue(index) - first;
        if (place < 0 || place >= count) continue;
        if (!any) clear(count);
        any = true;
        seen_.SetValue(place, 1.0f);
        if (start + index >= prompt) counts_.SetValue(place, counts_.GetValue(place) + 1.0f);
      }
      SetFlag<HardEvent::S_MTE2>(EVENT_ID0);
      WaitFlag<HardEvent::S_MTE2>(EVENT_ID0);
    }
    return any;
  }

  __aicore__ inline void clear(int32_t count) {
    Duplicate(seen_, 0.0f, round_up(count, kLanes));
    Duplicate(counts_, 0.0f, round_up(count, kLanes));
    scalar_after_vector();
  }

  __aicore__ inline void penalize(int64_t at, int32_t count, float repetition, float frequency,
                                  float presence) {
    const int32_t padded = round_up(count, kLanes);
    const auto logits = logits_buffer_.Get<float>(), divided = divided_buffer_.Get<float>(),
               multiplied = multiplied_buffer_.Get<float>();
    const auto mask = mask_buffer_.Get<uint8_t>();
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = count * sizeof(float);
    auto loading = in_.AllocTensor<float>();
    DataCopyPad(loading, tensors_.logits[at], copy, DataCopyPadExtParams<float>{});
    in_.EnQue(loading);
    vector_after_scalar();
    // comparisons process whole repeats
    Duplicate(logits, 0.0f, padded);
    Duplicate(multiplied, repetition, padded);
    PipeBarrier<PIPE_V>();
    auto loaded = in_.DeQue<float>();
    Muls(logits, loaded, 1.0f, count);
    in_.FreeTensor(loaded);
    PipeBarrier<PIPE_V>();
    Div(divided, logits, multiplied, padded);
    CompareScalar(mask, logits, 0.0f, CMPMODE::GT, padded);
    PipeBarrier<PIPE_V>();
    Mul(multiplied, logits, multiplied, padded);
    PipeBarrier<PIPE_V>();
    Select(divided, mask, divided, multiplied, SELMODE::VSEL_TENSOR_TENSOR_MODE, padded);
    PipeBarrier<PIPE_V>();
    CompareScalar(mask, seen_, 0.0f, CMPMODE::GT, padded);
    PipeBarrier<PIPE_V>();
    Select(logits, mask, divided, logits, SELMODE::VSEL_TENSOR_TENSOR_MODE, padded);
    Muls(multiplied, counts_, frequency, padded);
    Mins(counts_, counts_, 1.0f, padded);
    PipeBarrier<PIPE_V>();
    Sub(logits, logits, multiplied, padded);
    Muls(counts_, counts_, presence, padded);
    PipeBarrier<PIPE_V>();
    auto result = out_.AllocTensor<float>();
    Sub(result, logits, counts_, count);
    PipeBarrier<PIPE_V>();
    out_.EnQue(result);
    auto ready = out_.DeQue<float>();
    DataCopyPad(tensors_.logits[at], ready, copy);
    out_.FreeTensor(ready);
  }

  PenaltiesParams params_;
  PenaltiesTensors tensors_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> in_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> tokens_buffer_, mask_buffer_, seen_buffer_, counts_buffer_, logits_buffer_,
      divided_buffer_, multiplied_buffer_;
  LocalTensor<float> seen_, counts_;
};

}  // namespace ascend_npu
