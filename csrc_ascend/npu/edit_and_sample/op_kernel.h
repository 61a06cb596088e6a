// From logits to token ids in one launch: counts of the tokens so far, penalties, a grammar's mask,
// temperature, min-p, top-k, top-p and a draw, by the rule of the op `sample_tokens`.
//
// A core computes a row. One pass over the vocabulary finds the largest logit of every block of 64; all filters
// are lower bounds of the logit. A bound is searched among the logits that the unified buffer can hold, which
// the blocks' maxima choose, by bisection of the floats in order: "the largest value so that the logits not
// below it are k", or "hold the part p". Only rows whose kept tokens do not fit read the vocabulary again for
// steps of that search. Sums are kept in fixed point by the scalar unit, since the vector unit has no double.
//
// Expected on a 910B (1.2 TB/s, 40 vector cores), V = 151,936 in bfloat16: 18 µs for up to 40 rows with top-k
// 50, 10 µs greedy, 30 µs with top-p alone, by the bytes that the host shim counts; docs/ascend_kernels.md has
// the table.
#pragma once

#include "npu/edit_and_sample/logits.h"

namespace ascend_npu {

template <class T>
class EditAndSample {
 public:
  __aicore__ inline EditAndSample(const EditAndSampleParams& params, const SampleAddresses& tensors)
      : params_(params) {
    tensors_ = tensors;
    logits_.init(pipe_, params, tensors);
    pipe_.InitBuffer(maxima_buffer_, logits_.tiles() * kSampleBlock * sizeof(float));
    pipe_.InitBuffer(sums_buffer_, kSampleBlock * sizeof(float));
    pipe_.InitBuffer(tile_sums_buffer_, kSampleBlock * kBlockLanes * sizeof(float));
    pipe_.InitBuffer(numbers_buffer_, kLanes * sizeof(float));
    pipe_.InitBuffer(values_buffer_, kSampleRoom * sizeof(float));
    pipe_.InitBuffer(ids_buffer_, kSampleRoom * sizeof(int32_t));
    pipe_.InitBuffer(count_buffer_, 32);
    pipe_.InitBuffer(id_buffer_, 32);
    maxima_ = maxima_buffer_.template Get<float>();
    sums_ = sums_buffer_.template Get<float>();
    tile_sums_ = tile_sums_buffer_.template Get<float>();
    numbers_ = numbers_buffer_.template Get<float>();
    values_ = values_buffer_.template Get<float>();
    ids_ = ids_buffer_.template Get<int32_t>();
    ArithProgression(numbers_, 0.0f, 1.0f, kLanes);
    PipeBarrier<PIPE_V>();
  }

  // A core takes every GetBlockNum()-th row.
  __aicore__ inline void process() {
    for (int32_t row = GetBlockIdx(); row < params_.rows; row += GetBlockNum()) {
      const RowEdits edits{
          global<float>(tensors_.repetition).GetValue(row), global<float>(tensors_.frequency).GetValue(row),
          global<float>(tensors_.presence).GetValue(row), global<int64_t>(tensors_.count_rows).GetValue(row),
          global<int64_t>(tensors_.mask_rows).GetValue(row)};
      if (edits.count_row >= 0) count(edits.count_row, global<int64_t>(tensors_.fresh_ids).GetValue(row));
      logits_.open(row, edits);
      write(row, sample(row));
    }
  }

 private:
  // Counts a token that was added to the sequence.
  __aicore__ inline void count(int64_t count_row, int64_t id) {
    if (id < 0 || id >= params_.vocab) return;
    const auto place = global<int16_t>(tensors_.counts)[count_row * params_.vocab + id];
    const auto word = count_buffer_.template Get<int16_t>();
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = sizeof(int16_t);
    DataCopyPad(word, place, copy, DataCopyPadExtParams<int16_t>{});
    SetFlag<HardEvent::MTE2_S>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
    const int16_t old = word.GetValue(0);
    word.SetValue(0, static_cast<int16_t>(old < 0 ? 1 : old < 32767 ? old + 1 : old));
    SetFlag<HardEvent::S_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::S_MTE3>(EVENT_ID0);
    DataCopyPad(place, word, copy);
    // the tiles of counts are loaded behind it
    SetFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
    WaitFlag<HardEvent::MTE3_MTE2>(EVENT_ID0);
  }

  __aicore__ inline void write(int32_t row, int64_t id) {
    const auto word = id_buffer_.template Get<int64_t>();
    word.SetValue(0, id);
    SetFlag<HardEvent::S_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::S_MTE3>(EVENT_ID0);
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = sizeof(int64_t);
    DataCopyPad(global<int64_t>(tensors_.ids)[row], word, copy);
    SetFlag<HardEvent::MTE3_S>(EVENT_ID0);
    WaitFlag<HardEvent::MTE3_S>(EVENT_ID0);
  }

  __aicore__ inline int64_t sample(int32_t row) {
    find_maxima();
    const float temperature = global<float>(tensors_.temperature).GetValue(row);
    if (largest_ == float_of(kMinusInfinity)) return params_.nothing;
    if (!(temperature > 0.0f) || !(largest_ - largest_ == 0.0f)) return first_largest();
    scale_ = 1.0f / temperature;
    threshold_ = float_of(kMinusInfinity);
    holds_ = false;
    const float min_p = global<float>(tensors_.min_p).GetValue(row);
    const float top_p = global<float>(tensors_.top_p).GetValue(row);
    const int32_t top_k = global<int32_t>(tensors_.top_k).GetValue(row);
    if (min_p > 0.0f) threshold_ = largest_ + temperature * logarithm(min_p);
    if (top_k > 0 && top_k < params_.vocab) apply_top_k(top_k);
    if (top_p < 1.0f) apply_top_p(top_p);
    const uint64_t bits = uniform_bits(global<int64_t>(tensors_.seeds).GetValue(row),
                                       global<int64_t>(tensors_.positions).GetValue(row));
    return draw(bits);
  }

  // The largest logit of each block and tile, and of the row.
  __aicore__ inline void find_maxima() {
    logits_.begin(0.0f);
    while (logits_.next()) {
      WholeReduceMax(maxima_[logits_.number() * kSampleBlock], logits_.tile(), kLanes, kSampleTile / kLanes, 1,
                     1, kLanes / kBlockLanes, ReduceOrder::ORDER_ONLY_VALUE);
      PipeBarrier<PIPE_V>();
    }
    const auto& tile_maxima = logits_.tile_maxima();
    WholeReduceMax(tile_maxima, maxima_, kLanes, logits_.tiles(), 1, 1, kLanes / kBlockLanes,
                   ReduceOrder::ORDER_ONLY_VALUE);
    scalar_after_vector();
    logits_.set_maxima();
    largest_ = tile_maxima.GetValue(0);
    for (int32_t tile = 1; tile < logits_.tiles(); ++tile) {
      const float found = tile_maxima.GetValue(tile);
      if (found > largest_) largest_ = found;
    }
    vector_after_scalar();
  }

  // The first token with the largest logit; 0 if every logit is NaN.
  __aicore__ inline int64_t first_largest() {
    int32_t tile = 0;
    while (tile < logits_.tiles() && logits_.tile_maxima().GetValue(tile) != largest_) ++tile;
    if (tile == logits_.tiles()) return 0;
    logits_.begin_at(tile);
    logits_.next();
    scalar_after_vector();
    int32_t place = 0;
    while (place < kSampleTile - 1 && maxima_.GetValue(tile * kSampleBlock + place / kSampleBlock) != largest_)
      place += kSampleBlock;
    while (place < kSampleTile - 1 && logits_.tile().GetValue(place) != largest_) ++place;
    vector_after_scalar();
    return static_cast<int64_t>(tile) * kSampleTile + place;
  }

  __aicore__ inline float logarithm(float value) {
    Duplicate(sums_, value, kBlockLanes);
    PipeBarrier<PIPE_V>();
    Ln(sums_, sums_, kBlockLanes);
    scalar_after_vector();
    const float result = sums_.GetValue(0);
    vector_after_scalar();
    return result;
  }

  // Weights of the values not below `bound`, 0 for others, into room; the sums of their blocks into sums_. A
  // weight is e^((value - largest) / temperature), or 1 where values are counted. `count`: a multiple of 64.
  __aicore__ inline void weigh(const LocalTensor<float>& values, int32_t count, float bound, bool counts) {
    const auto weights = logits_.first();
    const auto& bits = logits_.bits();
    CompareScalar(bits, values, bound, CMPMODE::GE, count);
    if (counts) {
      Duplicate(weights, 1.0f, count);
    } else {
      Adds(weights, values, -largest_, count);
      PipeBarrier<PIPE_V>();
      Muls(weights, weights, scale_, count);
      PipeBarrier<PIPE_V>();
      Exp(weights, weights, count);
    }
    PipeBarrier<PIPE_V>();
    Select(weights, bits, weights, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    PipeBarrier<PIPE_V>();
    WholeReduceSum(sums_, weights, kLanes, count / kLanes, 1, 1, kLanes / kBlockLanes);
    PipeBarrier<PIPE_V>();
  }

  // The sum of sums_ into the place of a tile.
  __aicore__ inline void add_up(int32_t tile, int32_t count) {
    WholeReduceSum(tile_sums_[tile * kBlockLanes], sums_, count / kLanes, 1, 1, 1, kBlockLanes);
    PipeBarrier<PIPE_V>();
  }

  // The sum of the first `tiles` of tile_sums_.
  __aicore__ inline uint64_t total(int32_t tiles) {
    scalar_after_vector();
    uint64_t sum = 0;
    for (int32_t tile = 0; tile < tiles; ++tile) sum += fixed_of(tile_sums_.GetValue(tile * kBlockLanes));
    vector_after_scalar();
    return sum;
  }

  // The sum of the weights of the values not below `bound`. `count`: a multiple of 64.
  __aicore__ inline uint64_t measure(const LocalTensor<float>& values, int32_t count, float bound,
                                     bool counts) {
    int32_t tiles = 0;
    for (int32_t first = 0; first < count; first += kSampleTile, ++tiles) {
      const int32_t part = smaller(kSampleTile, count - first);
      weigh(values[first], part, bound, counts);
      add_up(tiles, part);
    }
    return total(tiles);
  }

  __aicore__ inline uint64_t measure_held(float bound, bool counts) {
    return held_ == 0 ? 0 : measure(values_, held_, bound, counts);
  }

  // The same of the row's logits.
  __aicore__ inline uint64_t measure_row(float bound, bool counts) {
    Duplicate(tile_sums_, 0.0f, kSampleBlock * kBlockLanes);
    PipeBarrier<PIPE_V>();
    logits_.begin(bound);
    while (logits_.next()) {
      weigh(logits_.tile(), kSampleTile, bound, counts);
      add_up(logits_.number(), kSampleTile);
    }
    return total(logits_.tiles());
  }

  // Keeps the logits in [low, high) in the unified buffer, in order; false: they are too many. Parts of
  // different tiles are padded with -inf to whole blocks of 32 bytes.
  __aicore__ inline bool hold(float low, float high) {
    const float nothing = float_of(kMinusInfinity);
    const bool is_bounded = high <= largest_;
    Duplicate(values_, nothing, kSampleRoom);
    PipeBarrier<PIPE_V>();
    held_ = 0;
    logits_.begin(low);
    while (logits_.next()) {
      if (held_ > kSampleRoom - kSampleTile) {
        logits_.stop();
        return false;
      }
      const auto& bits = logits_.bits();
      const auto numbers = logits_.second();
      CompareScalar(bits, logits_.tile(), low, CMPMODE::GE, kSampleTile);
      if (is_bounded) {
        const auto below = sums_.template ReinterpretCast<uint8_t>();
        for (int32_t first = 0; first < kSampleTile; first += kSampleTile / 4) {
          PipeBarrier<PIPE_V>();
          CompareScalar(below, logits_.tile()[first], high, CMPMODE::LT, kSampleTile / 4);
          PipeBarrier<PIPE_V>();
          const auto part = bits[first / 8].template ReinterpretCast<uint16_t>();
          And(part, part, sums_.template ReinterpretCast<uint16_t>(), kSampleTile / 4 / 16);
        }
      }
      ArithProgression(numbers, logits_.number() * kSampleTile, 1, kSampleTile);
      PipeBarrier<PIPE_V>();
      const auto pattern = bits.template ReinterpretCast<uint32_t>();
      const GatherMaskParams once(1, 1, 0, 0);
      uint64_t found = 0;
      GatherMask(ids_[held_], numbers, pattern, true, kSampleTile, once, found);
      GatherMask(values_[held_], logits_.tile(), pattern, true, kSampleTile, once, found);
      PipeBarrier<PIPE_V>();
      const int32_t count = static_cast<int32_t>(found), whole = count / kLanes * kLanes;
      if (count > whole) {
        // what the last block has behind the last value
        CompareScalar(bits, numbers_, static_cast<float>(count - whole), CMPMODE::LT, kLanes);
        PipeBarrier<PIPE_V>();
        const auto last = values_[held_ + whole];
        Select(last, bits, last, nothing, SELMODE::VSEL_TENSOR_SCALAR_MODE, kLanes);
        PipeBarrier<PIPE_V>();
      }
      held_ += round_up(count, kBlockLanes);
    }
    if (held_ % kLanes != 0) {
      // -inf is there, but for what a wider store may have left
      Duplicate(values_[held_], nothing, round_up(held_, kLanes) - held_);
      PipeBarrier<PIPE_V>();
    }
    held_ = round_up(held_, kLanes);
    return true;
  }

  // The largest bound in [low, high) so that what `values` have from it on, and `above`, are at least `goal`,
  // which holds for `low`.
  __aicore__ inline float bisect(const LocalTensor<float>& values, int32_t count, int32_t low, int32_t high,
                                 uint64_t above, uint64_t goal, bool counts) {
    while (static_cast<int64_t>(high) - low > 1) {
      const int32_t middle = static_cast<int32_t>((static_cast<int64_t>(low) + high) >> 1);
      if (above + measure(values, count, float_of_key(middle), counts) >= goal)
        low = middle;
      else
        high = middle;
    }
    return float_of_key(low);
  }

  // The same for the whole row, whose logits from `high` on weigh `above`: halves the range until its logits
  // fit.
  __aicore__ inline float bisect_row(int32_t low, int32_t high, uint64_t above, uint64_t goal, bool counts) {
    constexpr int32_t kTry = 4;  // halvings between two attempts
    for (int32_t step = 1; static_cast<int64_t>(high) - low > 1; ++step) {
      if (step % kTry == 0 && hold(float_of_key(low), float_of_key(high)))
        return held_ == 0 ? float_of_key(low) : bisect(values_, held_, low, high, above, goal, counts);
      const int32_t middle = static_cast<int32_t>((static_cast<int64_t>(low) + high) >> 1);
      const uint64_t found = measure_row(float_of_key(middle), counts);
      if (found >= goal) {
        low = middle;
      } else {
        high = middle;
        above = found;
      }
    }
    return float_of_key(low);
  }

  // A bound that at least `count` of the row's logits reach: the `count`-th largest maximum of a block.
  __aicore__ inline float block_bound(int32_t count) {
    if (count > params_.vocab / kSampleBlock) return float_of(kMinusInfinity);
    return bisect(maxima_, logits_.tiles() * kSampleBlock, key_of(float_of(kMinusInfinity)),
                  key_of(largest_) + 1, 0, static_cast<uint64_t>(count) << kFraction, true);
  }

  // Raises the threshold to the k-th largest kept logit, if there are that many.
  __aicore__ inline void apply_top_k(int32_t k) {
    const float bound = block_bound(k), low = bound > threshold_ ? bound : threshold_;
    const uint64_t goal = static_cast<uint64_t>(k) << kFraction;
    const int32_t high = key_of(largest_) + 1;
    holds_ = hold(low, above_all());
    if (holds_) {
      if (measure_held(low, true) >= goal)
        threshold_ = bisect(values_, held_, key_of(low), high, 0, goal, true);
    } else if (measure_row(low, true) >= goal) {
      threshold_ = bisect_row(key_of(low), high, 0, goal, true);
    }
  }

  // Raises the threshold to the lowest logit for which the logits above it hold less than top_p of the kept
  // sum.
  __aicore__ inline void apply_top_p(float top_p) {
    constexpr int32_t kBlocks = 512;  // whose maxima the logits that are held first reach
    int32_t low = key_of(threshold_), high = key_of(largest_) + 1;
    if (holds_) {
      const uint64_t goal = part_of(measure_held(threshold_, false), top_p);
      threshold_ = bisect(values_, held_, low, high, 0, goal, false);
      return;
    }
    const uint64_t goal = part_of(measure_row(threshold_, false), top_p);
    const float bound = block_bound(larger(1, smaller(kBlocks, params_.vocab / kSampleBlock)));
    const float first = bound > threshold_ ? bound : threshold_;
    uint64_t above = 0;
    if (hold(first, above_all())) {
      const uint64_t found = measure_held(first, false);
      if (found >= goal) {
        holds_ = true;
        threshold_ = bisect(values_, held_, key_of(first), high, 0, goal, false);
        return;
      }
      high = key_of(first);
      above = found;
    }
    // lower logits weigh nothing
    const int32_t lightest = key_of(largest_ - 104.0f / scale_);
    threshold_ = bisect_row(larger(low, lightest), high, above, goal, false);
  }

  __aicore__ inline float above_all() const { return float_of(0x7F800000); }

  // The kept token whose interval of [0, sum of weights) has the number.
  __aicore__ inline int64_t draw(uint64_t bits) {
    const uint64_t sum = holds_ ? measure_held(threshold_, false) : measure_row(threshold_, false);
    const uint64_t target = multiply_high(bits, sum);
    const int32_t tiles = holds_ ? ceil_div(held_, kSampleTile) : logits_.tiles();
    uint64_t before = 0;
    const int32_t tile = find(tile_sums_, 0, kBlockLanes, tiles, target, before);
    int32_t count = kSampleTile;
    if (holds_) {
      count = smaller(kSampleTile, held_ - tile * kSampleTile);
      weigh(values_[tile * kSampleTile], count, threshold_, false);
    } else {
      logits_.begin_at(tile);
      logits_.next();
      weigh(logits_.tile(), kSampleTile, threshold_, false);
    }
    scalar_after_vector();
    const int32_t block = find(sums_, 0, 1, count / kLanes, target, before);
    const int32_t place =
        block * kSampleBlock + find(logits_.first(), block * kSampleBlock, 1, kSampleBlock, target, before);
    const int64_t index = static_cast<int64_t>(tile) * kSampleTile + place;
    const int64_t id = holds_ ? ids_.GetValue(static_cast<uint32_t>(index)) : index;
    vector_after_scalar();
    return id;
  }

  // The first of `count` weights, `stride` apart, behind which the sum exceeds the target, or else the last one
  // above 0; `before`: the sum in front of it.
  __aicore__ inline int32_t find(const LocalTensor<float>& weights, int32_t first, int32_t stride,
                                 int32_t count, uint64_t target, uint64_t& before) {
    int32_t last = 0;
    uint64_t sum = before;
    for (int32_t index = 0; index < count; ++index) {
      const uint64_t weight = fixed_of(weights.GetValue(first + index * stride));
      if (weight == 0) continue;
      last = index;
      before = sum;
      sum += weight;
      if (sum > target) break;
    }
    return last;
  }

  EditAndSampleParams params_;
  SampleAddresses tensors_;
  TPipe pipe_;
  RowLogits<T> logits_;
  float largest_, scale_, threshold_;
  bool holds_;    // values_ are all logits from the threshold on, or more
  int32_t held_;  // a multiple of 64
  TBuf<TPosition::VECCALC> maxima_buffer_, sums_buffer_, tile_sums_buffer_, numbers_buffer_, values_buffer_,
      ids_buffer_, count_buffer_, id_buffer_;
  LocalTensor<float> maxima_, sums_, tile_sums_, numbers_, values_;
  LocalTensor<int32_t> ids_;
};

}  // namespace ascend_npu
