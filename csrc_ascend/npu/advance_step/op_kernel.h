// From one decoding step to the next without the host: each row's sampled token becomes its input, one position
// on.
//
// All of it is integer work of a few instructions for each row, so the scalar unit does it; copies in and out
// are whole tiles.
#pragma once

#include "npu/advance_step/params.h"
#include "npu/common/device.h"

namespace ascend_npu {

struct AdvanceStepTensors {
  GlobalTensor<int64_t> sampled, input_ids, positions, slot_mapping;
  GlobalTensor<int32_t> seq_lens, block_table;
  GlobalTensor<uint8_t> stopped;
};

class AdvanceStep {
 public:
  __aicore__ inline AdvanceStep(const AdvanceStepParams& params, const AdvanceStepTensors& tensors)
      : params_(params), tensors_(tensors) {
    pipe_.InitBuffer(sampled_, params.tile_rows * sizeof(int64_t));
    pipe_.InitBuffer(input_ids_, params.tile_rows * sizeof(int64_t));
    pipe_.InitBuffer(positions_, params.tile_rows * sizeof(int64_t));
    pipe_.InitBuffer(slots_, params.tile_rows * sizeof(int64_t));
    pipe_.InitBuffer(seq_lens_, params.tile_rows * sizeof(int32_t));
    pipe_.InitBuffer(stopped_, params.tile_rows * sizeof(uint8_t));
  }

  __aicore__ inline void process() {
    const int32_t tiles = ceil_div(params_.rows, params_.tile_rows);
    for (int32_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
      const int32_t first = tile * params_.tile_rows;
      advance(first, smaller(params_.tile_rows, params_.rows - first));
      // The next tile comes into the same buffers when this one is out. The scalar unit needs no flag of its
      // own: the copies out waited for it, and it waits for the copies in.
      SetFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
      WaitFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
    }
  }

 private:
  template <class T>
  __aicore__ inline void load(const LocalTensor<T>& to, const GlobalTensor<T>& from, int32_t first,
                              int32_t count) {
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = count * sizeof(T);
    DataCopyPad(to, from[first], copy, DataCopyPadExtParams<T>{});
  }

  template <class T>
  __aicore__ inline void store(const GlobalTensor<T>& to, const LocalTensor<T>& from, int32_t first,
                               int32_t count) {
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = count * sizeof(T);
    DataCopyPad(to[first], from, copy);
  }

  __aicore__ inline void advance(int32_t first, int32_t count) {
    const auto sampled = sampled_.Get<int64_t>(), input_ids = input_ids_.Get<int64_t>(),
               positions = positions_.Get<int64_t>(), slots = slots_.Get<int64_t>();
    const auto seq_lens = seq_lens_.Get<int32_t>();
    const auto stopped = stopped_.Get<uint8_t>();
    load(sampled, tensors_.sampled, first, count);
    load(input_ids, tensors_.input_ids, first, count);
    load(positions, tensors_.positions, first, count);
    load(seq_lens, tensors_.seq_lens, first, count);
    load(stopped, tensors_.stopped, first, count);
    SetFlag<HardEvent::MTE2_S>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
    for (int32_t index = 0; index < count; ++index) {
      const int64_t position = positions.GetValue(index) + 1;
      const int64_t block = position / params_.block_size;
      if (stopped.GetValue(index) != 0 || block >= params_.max_blocks) {
        slots.SetValue(index, -1);
        continue;
      }
      const int64_t page =
          tensors_.block_table.GetValue(static_cast<int64_t>(first + index) * params_.max_blocks + block);
      input_ids.SetValue(index, sampled.GetValue(index));
      positions.SetValue(index, position);
      seq_lens.SetValue(index, seq_lens.GetValue(index) + 1);
      slots.SetValue(index, page * params_.block_size + position - block * params_.block_size);
    }
    SetFlag<HardEvent::S_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::S_MTE3>(EVENT_ID0);
    store(tensors_.input_ids, input_ids, first, count);
    store(tensors_.positions, positions, first, count);
    store(tensors_.seq_lens, seq_lens, first, count);
    store(tensors_.slot_mapping, slots, first, count);
  }

  AdvanceStepParams params_;
  AdvanceStepTensors tensors_;
  TPipe pipe_;
  TBuf<TPosition::VECCALC> sampled_, input_ids_, positions_, slots_, seq_lens_, stopped_;
};

}  // namespace ascend_npu
