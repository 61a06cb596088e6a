// A row's logits, edited while they are loaded: masked by a grammar, penalised by the tokens so far. Device
// code.
#pragma once

#include "npu/edit_and_sample/numbers.h"
#include "npu/edit_and_sample/params.h"

namespace ascend_npu {

// `EditAndSampleTensors` as the device has them.
struct SampleAddresses {
  GM_ADDR logits;
  GM_ADDR counts;
  GM_ADDR count_rows;
  GM_ADDR fresh_ids;
  GM_ADDR repetition;
  GM_ADDR frequency;
  GM_ADDR presence;
  GM_ADDR bitmask;
  GM_ADDR mask_rows;
  GM_ADDR temperature;
  GM_ADDR top_k;
  GM_ADDR top_p;
  GM_ADDR min_p;
  GM_ADDR seeds;
  GM_ADDR positions;
  GM_ADDR ids;
};

// What a row's logits are edited by.
struct RowEdits {
  float repetition, frequency, presence;
  int64_t count_row;  // negative: no penalties
  int64_t mask_row;   // negative: no mask
};

// Passes over a row, a tile at a time; the next tile is copied in while the current one is computed with.
//
//   logits.begin(low);
//   while (logits.next()) … logits.tile(), logits.number() …
template <class T>
class RowLogits {
 public:
  __aicore__ inline void init(TPipe& pipe, const EditAndSampleParams& params, const SampleAddresses& tensors) {
    params_ = params;
    tiles_ = ceil_div(params.vocab, kSampleTile);
    logits_ = global<T>(tensors.logits);
    counts_ = global<int16_t>(tensors.counts);
    bitmask_ = global<int32_t>(tensors.bitmask);
    constexpr uint32_t bytes = kSampleTile * sizeof(float);
    pipe.InitBuffer(in_, 2, kSampleTile * sizeof(T));
    pipe.InitBuffer(counts_in_, 1, kSampleTile * sizeof(int16_t));
    pipe.InitBuffer(mask_in_, 1, kSampleTile / 8);
    pipe.InitBuffer(tile_buffer_, bytes);
    pipe.InitBuffer(first_buffer_, bytes);
    pipe.InitBuffer(second_buffer_, bytes);
    pipe.InitBuffer(third_buffer_, bytes);
    pipe.InitBuffer(bits_buffer_, kSampleTile / 8);
    pipe.InitBuffer(tile_maxima_buffer_, kSampleBlock * sizeof(float));
    tile_ = tile_buffer_.template Get<float>();
    bits_ = bits_buffer_.template Get<uint8_t>();
    tile_maxima_ = tile_maxima_buffer_.template Get<float>();
  }

  __aicore__ inline void open(int32_t row, const RowEdits& edits) {
    row_ = row;
    edits_ = edits;
    knows_maxima_ = false;
  }

  // Starts a pass over the tiles whose largest logit is not below `low`; over all before `set_maxima`.
  __aicore__ inline void begin(float low) {
    low_ = low;
    end_ = tiles_;
    ahead_ = find(0);
    if (ahead_ < end_) load(ahead_);
  }

  // Starts a pass over a single tile.
  __aicore__ inline void begin_at(int32_t number) {
    low_ = float_of(kMinusInfinity);
    end_ = number + 1;
    ahead_ = number;
    load(ahead_);
  }

  // Goes to the next tile; false behind the last one.
  __aicore__ inline bool next() {
    number_ = ahead_;
    if (number_ >= end_) return false;
    take();
    ahead_ = find(number_ + 1);
    if (ahead_ < end_) load(ahead_);
    return true;
  }

  // Ends a pass early.
  __aicore__ inline void stop() {
    if (ahead_ >= end_) return;
    number_ = ahead_;
    take();
  }

  // The largest logit of each tile, which later passes skip tiles by.
  __aicore__ inline const LocalTensor<float>& tile_maxima() const { return tile_maxima_; }
  __aicore__ inline void set_maxima() { knows_maxima_ = true; }

  __aicore__ inline int32_t tiles() const { return tiles_; }
  __aicore__ inline int32_t number() const { return number_; }
  // [kSampleTile], -inf behind the vocabulary.
  __aicore__ inline const LocalTensor<float>& tile() const { return tile_; }
  // Room for computing with a tile: [kSampleTile] floats, and a bit for each.
  __aicore__ inline LocalTensor<float> first() { return first_buffer_.template Get<float>(); }
  __aicore__ inline LocalTensor<int32_t> second() { return second_buffer_.template Get<int32_t>(); }
  __aicore__ inline const LocalTensor<uint8_t>& bits() const { return bits_; }

 private:
  __aicore__ inline int32_t find(int32_t number) const {
    while (knows_maxima_ && number < end_ && !(tile_maxima_.GetValue(number) >= low_)) ++number;
    return number;
  }

  __aicore__ inline int32_t count_of(int32_t number) const {
    return smaller(kSampleTile, params_.vocab - number * kSampleTile);
  }

  template <class E, class Queue>
  __aicore__ inline void load_into(Queue& queue, const GlobalTensor<E>& from, int32_t count) {
    auto loading = queue.template AllocTensor<E>();
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = count * sizeof(E);
    DataCopyPad(loading, from, copy, DataCopyPadExtParams<E>{});
    queue.EnQue(loading);
  }

  __aicore__ inline void load(int32_t number) {
    const int64_t first = static_cast<int64_t>(number) * kSampleTile;
    const int32_t count = count_of(number);
    load_into(in_, logits_[static_cast<int64_t>(row_) * params_.logits_stride + first], count);
    if (edits_.count_row >= 0) load_into(counts_in_, counts_[edits_.count_row * params_.vocab + first], count);
    if (edits_.mask_row >= 0)
      load_into(mask_in_, bitmask_[edits_.mask_row * params_.mask_words + first / 32], ceil_div(count, 32));
  }

  // The loaded tile as floats, edited.
  __aicore__ inline void take() {
    const int32_t count = count_of(number_), padded = round_up(count, kLanes);
    const float nothing = float_of(kMinusInfinity);
    PipeBarrier<PIPE_V>();
    if (count < kSampleTile) {
      Duplicate(tile_, nothing, kSampleTile);
      PipeBarrier<PIPE_V>();
    }
    auto loaded = in_.template DeQue<T>();
    widen(loaded, count);
    in_.FreeTensor(loaded);
    PipeBarrier<PIPE_V>();
    if (edits_.count_row >= 0) penalize(count, padded);
    if (edits_.mask_row < 0) return;
    auto mask = mask_in_.template DeQue<int32_t>();
    Select(tile_, mask.template ReinterpretCast<uint8_t>(), tile_, nothing, SELMODE::VSEL_TENSOR_SCALAR_MODE,
           count);
    mask_in_.FreeTensor(mask);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void widen(const LocalTensor<float>& loaded, int32_t count) {
    Muls(tile_, loaded, 1.0f, count);
  }

  template <class E>
  __aicore__ inline void widen(const LocalTensor<E>& loaded, int32_t count) {
    Cast(tile_, loaded, RoundMode::CAST_NONE, count);
  }

  // In the op reference's order of operations.
  __aicore__ inline void penalize(int32_t count, int32_t padded) {
    const auto divided = first_buffer_.template Get<float>(), multiplied = second_buffer_.template Get<float>(),
               counts = third_buffer_.template Get<float>();
    Duplicate(counts, 0.0f, padded);
    Duplicate(multiplied, edits_.repetition, padded);
    PipeBarrier<PIPE_V>();
    auto loaded = counts_in_.template DeQue<int16_t>();
    Cast(counts, loaded, RoundMode::CAST_NONE, count);
    counts_in_.FreeTensor(loaded);
    Div(divided, tile_, multiplied, padded);
    CompareScalar(bits_, tile_, 0.0f, CMPMODE::GT, padded);
    PipeBarrier<PIPE_V>();
    Mul(multiplied, tile_, multiplied, padded);
    PipeBarrier<PIPE_V>();
    Select(divided, bits_, divided, multiplied, SELMODE::VSEL_TENSOR_TENSOR_MODE, padded);
    PipeBarrier<PIPE_V>();
    CompareScalar(bits_, counts, 0.0f, CMPMODE::NE, padded);
    PipeBarrier<PIPE_V>();
    Select(tile_, bits_, divided, tile_, SELMODE::VSEL_TENSOR_TENSOR_MODE, padded);
    // tokens of the prompt alone have -1
    Maxs(counts, counts, 0.0f, padded);
    PipeBarrier<PIPE_V>();
    Muls(multiplied, counts, edits_.frequency, padded);
    Mins(counts, counts, 1.0f, padded);
    PipeBarrier<PIPE_V>();
    Sub(tile_, tile_, multiplied, padded);
    Muls(counts, counts, edits_.presence, padded);
    PipeBarrier<PIPE_V>();
    Sub(tile_, tile_, counts, padded);
    PipeBarrier<PIPE_V>();
  }

  EditAndSampleParams params_;
  RowEdits edits_;
  int32_t row_, tiles_, number_, ahead_, end_;
  float low_;
  bool knows_maxima_;
  GlobalTensor<T> logits_;
  GlobalTensor<int16_t> counts_;
  GlobalTensor<int32_t> bitmask_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECIN, 1> counts_in_, mask_in_;
  TBuf<TPosition::VECCALC> tile_buffer_, first_buffer_, second_buffer_, third_buffer_, bits_buffer_,
      tile_maxima_buffer_;
  LocalTensor<float> tile_, tile_maxima_;
  LocalTensor<uint8_t> bits_;
};

}  // namespace ascend_npu
