// The vector unit's instructions in their (mask, repeats, strides) form, for float: each repeat works on up to
// eight blocks of 32 bytes; strides between blocks and between repeats are in blocks, and 0 uses one again.
#pragma once

#include <vector>

#include "vector.h"

namespace AscendC {

enum class ReduceOrder { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

namespace detail {

constexpr std::uint32_t kLanes = 64;      // floats of a repeat
constexpr std::uint32_t kBlockLanes = 8;  // floats of a block

// The chip's fields have eight bits; larger values would wrap around.
inline std::uint8_t eight_bits(int value, const char* call) {
  if (value < 0 || value > 255) violate(call, std::to_string(value) + " does not fit into eight bits");
  return static_cast<std::uint8_t>(value);
}

inline void require_repeats(std::uint64_t mask, int repeats, const char* call) {
  if (mask == 0 || mask > kLanes) violate(call, "a mask of " + std::to_string(mask) + " lanes");
  if (repeats < 1 || repeats > 255) violate(call, std::to_string(repeats) + " repeats, not 1 to 255");
}

// An operand that repeats walk over.
struct Walk {
  LocalTensor<float> tensor;
  std::uint32_t block_stride, repeat_stride;

  std::uint32_t at(std::uint32_t repeat, std::uint32_t lane) const {
    return (repeat * repeat_stride + lane / kBlockLanes * block_stride) * kBlockLanes + lane % kBlockLanes;
  }
};

// The ranges that the repeats access, with adjacent blocks merged.
inline void touch(std::vector<ascend_sim::ascendc::Access>& accesses, const Walk& walk, std::uint32_t mask,
                  std::uint32_t repeats, bool is_write, const char* call) {
  if (walk.tensor.data() == nullptr) violate(call, "an operand without memory");
  require_aligned(walk.tensor.data(), call);
  const std::size_t begin = accesses.size();
  for (std::uint32_t repeat = 0; repeat < (walk.repeat_stride == 0 ? 1 : repeats); ++repeat) {
    for (std::uint32_t lane = 0; lane < mask; lane += kBlockLanes) {
      if (lane > 0 && walk.block_stride == 0) continue;
      const std::uint32_t lanes = std::min(kBlockLanes, mask - lane), first = walk.at(repeat, lane);
      if (first + lanes > walk.tensor.GetSize())
        violate(call,
                "repeats reach beyond the tensor of " + std::to_string(walk.tensor.GetSize()) + " elements");
      const float* pointer = walk.tensor.data() + first;
      if (accesses.size() > begin) {
        auto& last = accesses.back();
        if (static_cast<const std::uint8_t*>(last.pointer) + last.bytes ==
            reinterpret_cast<const std::uint8_t*>(pointer)) {
          last.bytes += lanes * sizeof(float);
          continue;
        }
      }
      accesses.push_back({pointer, lanes * sizeof(float), is_write});
    }
  }
}

inline std::vector<ascend_sim::ascendc::Access>& no_accesses() {
  static thread_local std::vector<ascend_sim::ascendc::Access> accesses;
  accesses.clear();
  return accesses;
}

}  // namespace detail

// Strides of destination and sources: between the blocks of a repeat, between repeats.
struct BinaryRepeatParams {
  BinaryRepeatParams(int dst_block, int src0_block, int src1_block, int dst_repeat, int src0_repeat,
                     int src1_repeat)
      : dstBlkStride(detail::eight_bits(dst_block, "BinaryRepeatParams")),
        src0BlkStride(detail::eight_bits(src0_block, "BinaryRepeatParams")),
        src1BlkStride(detail::eight_bits(src1_block, "BinaryRepeatParams")),
        dstRepStride(detail::eight_bits(dst_repeat, "BinaryRepeatParams")),
        src0RepStride(detail::eight_bits(src0_repeat, "BinaryRepeatParams")),
        src1RepStride(detail::eight_bits(src1_repeat, "BinaryRepeatParams")) {}
  std::uint8_t dstBlkStride, src0BlkStride, src1BlkStride, dstRepStride, src0RepStride, src1RepStride;
};

struct BrcbRepeatParams {
  BrcbRepeatParams(int dst_block, int dst_repeat)
      : dstBlkStride(detail::eight_bits(dst_block, "BrcbRepeatParams")),
        dstRepStride(detail::eight_bits(dst_repeat, "BrcbRepeatParams")) {}
  std::uint8_t dstBlkStride, dstRepStride;
};

namespace detail {

// `function(destination's old value, left, right)`; `accumulates`: the old value is read.
template <class Function>
void repeat_binary(const char* call, const LocalTensor<float>& to, const LocalTensor<float>& left,
                   const LocalTensor<float>& right, std::uint64_t mask, int repeats,
                   const BinaryRepeatParams& strides, bool accumulates, Function function) {
  require_repeats(mask, repeats, call);
  if (strides.dstBlkStride == 0 || (strides.dstRepStride == 0 && repeats > 1))
    violate(call, "the destination's stride is 0: it would be written several times");
  const Walk target{to, strides.dstBlkStride, strides.dstRepStride};
  const Walk first{left, strides.src0BlkStride, strides.src0RepStride};
  const Walk second{right, strides.src1BlkStride, strides.src1RepStride};
  const auto lanes = static_cast<std::uint32_t>(mask);
  auto& accesses = no_accesses();
  touch(accesses, first, lanes, repeats, false, call);
  touch(accesses, second, lanes, repeats, false, call);
  if (accumulates) touch(accesses, target, lanes, repeats, false, call);
  touch(accesses, target, lanes, repeats, true, call);
  core().execute(PIPE_V, call, accesses.data(), accesses.size());
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      float& result = to.data()[target.at(repeat, lane)];
      result = function(result, left.data()[first.at(repeat, lane)], right.data()[second.at(repeat, lane)]);
    }
  }
}

}  // namespace detail

#define ASCENDC_REPEAT(Name, accumulates, expression)                                  \
  inline void Name(const LocalTensor<float>& to, const LocalTensor<float>& left,       \
                   const LocalTensor<float>& right, std::uint64_t mask, int repeats,   \
                   const BinaryRepeatParams& strides) {                                \
    detail::repeat_binary(#Name, to, left, right, mask, repeats, strides, accumulates, \
                          [](float old, float a, float b) {                            \
                            (void)old;                                                 \
                            return expression;                                         \
                          });                                                          \
  }
ASCENDC_REPEAT(Add, false, a + b)
ASCENDC_REPEAT(Sub, false, a - b)
ASCENDC_REPEAT(Mul, false, a* b)
ASCENDC_REPEAT(Div, false, a / b)
ASCENDC_REPEAT(Max, false, a > b ? a : b)
ASCENDC_REPEAT(MulAddDst, true, old + a * b)
#undef ASCENDC_REPEAT

namespace detail {

// Halves the lanes until one is left, as the chip's adder tree does; to[repeat * stride] is the result.
template <class Function>
void reduce_repeats(const char* call, const LocalTensor<float>& to, const LocalTensor<float>& from, int mask,
                    int repeats, int to_stride, int block_stride, int repeat_stride, Function function) {
  require_repeats(static_cast<std::uint64_t>(mask), repeats, call);
  if (to_stride < 1) violate(call, "results would overwrite each other");
  const Walk source{from, eight_bits(block_stride, call), static_cast<std::uint32_t>(repeat_stride)};
  auto& accesses = no_accesses();
  touch(accesses, source, mask, repeats, false, call);
  if (static_cast<std::uint32_t>((repeats - 1) * to_stride) >= to.GetSize())
    violate(call, "more results than the tensor holds");
  require_aligned(to.data(), call);
  for (int repeat = 0; repeat < repeats; ++repeat)
    accesses.push_back({to.data() + repeat * to_stride, sizeof(float), true});
  core().execute(PIPE_V, call, accesses.data(), accesses.size());
  for (int repeat = 0; repeat < repeats; ++repeat) {
    float lanes[kLanes];
    for (int lane = 0; lane < mask; ++lane) lanes[lane] = from.data()[source.at(repeat, lane)];
    for (int count = mask; count > 1; count = (count + 1) / 2)
      for (int lane = 0; lane < count / 2; ++lane)
        lanes[lane] = function(lanes[lane], lanes[lane + (count + 1) / 2]);
    to.data()[repeat * to_stride] = lanes[0];
  }
}

}  // namespace detail

inline void WholeReduceSum(const LocalTensor<float>& to, const LocalTensor<float>& from, int mask, int repeats,
                           int to_stride, int block_stride, int repeat_stride) {
  detail::reduce_repeats("WholeReduceSum", to, from, mask, repeats, to_stride, block_stride, repeat_stride,
                         [](float a, float b) { return a + b; });
}

inline void WholeReduceMax(const LocalTensor<float>& to, const LocalTensor<float>& from, int mask, int repeats,
                           int to_stride, int block_stride, int repeat_stride, ReduceOrder order) {
  require(order == ReduceOrder::ORDER_ONLY_VALUE, "WholeReduceMax", "this shim knows ORDER_ONLY_VALUE only");
  detail::reduce_repeats("WholeReduceMax", to, from, mask, repeats, to_stride, block_stride, repeat_stride,
                         [](float a, float b) { return a > b ? a : b; });
}

// Each of eight elements fills a block of the destination; so in every repeat.
inline void Brcb(const LocalTensor<float>& to, const LocalTensor<float>& from, int repeats,
                 const BrcbRepeatParams& strides) {
  constexpr const char* call = "Brcb";
  detail::require_repeats(detail::kLanes, repeats, call);
  if (to.data() == from.data()) violate(call, "destination and source are the same");
  detail::require_operand(from, repeats * detail::kBlockLanes, call);
  const detail::Walk target{to, strides.dstBlkStride, strides.dstRepStride};
  auto& accesses = detail::no_accesses();
  accesses.push_back(detail::reads(from, repeats * detail::kBlockLanes));
  detail::touch(accesses, target, detail::kLanes, repeats, true, call);
  core().execute(PIPE_V, call, accesses.data(), accesses.size());
  for (int repeat = 0; repeat < repeats; ++repeat)
    for (std::uint32_t lane = 0; lane < detail::kLanes; ++lane)
      to.data()[target.at(repeat, lane)] =
          from.data()[repeat * detail::kBlockLanes + lane / detail::kBlockLanes];
}

}  // namespace AscendC
