// Small kernels that each break one rule of Ascend C; `message_of` runs one and tells what the shim said.
#include <iterator>
#include <string>
#include <vector>

#include "sim/ascendc/launch.h"

namespace {

using namespace AscendC;
using ascend_sim::ascendc::GlobalMemory;
using ascend_sim::ascendc::launch;
using ascend_sim::ascendc::Violation;

constexpr int kCount = 64;

// What each kernel gets: an input and an output of kCount floats, a queue each way and a buffer.
struct Kernel {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  TBuf<> buffer;
  GlobalTensor<float> x, y;

  Kernel(float* input, float* output) {
    pipe.InitBuffer(in, 1, kCount * sizeof(float));
    pipe.InitBuffer(out, 1, kCount * sizeof(float));
    pipe.InitBuffer(buffer, kCount * sizeof(float));
    x.SetGlobalBuffer(input, kCount);
    y.SetGlobalBuffer(output, kCount);
  }

  LocalTensor<float> load() {
    auto tensor = in.AllocTensor<float>();
    DataCopy(tensor, x, kCount);
    in.EnQue(tensor);
    return in.DeQue<float>();
  }

  void store(const LocalTensor<float>& tensor) {
    out.EnQue(tensor);
    auto ready = out.DeQue<float>();
    DataCopy(y, ready, kCount);
    out.FreeTensor(ready);
  }
};

// Doubles the input: breaks no rule.
void correct(Kernel& k) {
  auto a = k.load();
  auto b = k.out.AllocTensor<float>();
  Adds(b, a, 0.0f, kCount);
  PipeBarrier<PIPE_V>();
  Add(b, b, a, kCount);
  k.in.FreeTensor(a);
  k.store(b);
}

void second_alloc(Kernel& k) {
  k.in.AllocTensor<float>();
  k.in.AllocTensor<float>();
}

void dequeue_of_nothing(Kernel& k) { k.in.DeQue<float>(); }

void enqueue_of_a_stranger(Kernel& k) { k.in.EnQue(k.buffer.Get<float>()); }

void free_before_dequeue(Kernel& k) { k.in.FreeTensor(k.in.AllocTensor<float>()); }

void budget(Kernel& k) {
  TBuf<> big;
  k.pipe.InitBuffer(big, 192 * 1024);
}

void no_barrier(Kernel& k) {
  auto a = k.load();
  auto b = k.out.AllocTensor<float>();
  Adds(b, a, 0.0f, kCount);
  Add(b, b, a, kCount);
}

void no_event_mte2_v(Kernel& k) {
  auto a = k.in.AllocTensor<float>();
  DataCopy(a, k.x, kCount);
  Adds(k.buffer.Get<float>(), a, 1.0f, kCount);
}

void no_event_v_mte3(Kernel& k) {
  auto b = k.out.AllocTensor<float>();
  Duplicate(b, 1.0f, kCount);
  DataCopy(k.y, b, kCount);
}

void no_event_v_s(Kernel& k) {
  auto b = k.buffer.Get<float>();
  Duplicate(b, 1.0f, kCount);
  b.GetValue(0);
}

void no_event_s_v(Kernel& k) {
  auto b = k.buffer.Get<float>();
  for (int i = 0; i < kCount; ++i) b.SetValue(i, 1.0f);
  Adds(b, b, 1.0f, kCount);
}

void no_event_mte3_mte2(Kernel& k) {
  auto b = k.out.AllocTensor<float>();
  Duplicate(b, 1.0f, kCount);
  k.store(b);
  DataCopy(k.in.AllocTensor<float>(), k.y, kCount);
}

// Adds 6 to the output in two parts that meet within a block of global memory, which is no violation.
void neighbours_in_global_memory(Kernel& k) {
  for (int half = 0; half < 2; ++half) {
    const int first = half * 13, count = half == 0 ? 13 : kCount - 13;
    DataCopyExtParams copy{};
    copy.blockCount = 1;
    copy.blockLen = count * sizeof(float);
    // both copies are of the output: what is next to the bytes that the first one writes is read by the second
    auto in = k.in.AllocTensor<float>();
    DataCopyPad(in, k.y[first], copy, DataCopyPadExtParams<float>{});
    k.in.EnQue(in);
    in = k.in.DeQue<float>();
    auto out = k.out.AllocTensor<float>();
    Adds(out, in, 6.0f, count);
    k.in.FreeTensor(in);
    k.out.EnQue(out);
    out = k.out.DeQue<float>();
    DataCopyPad(k.y[first], out, copy);
    k.out.FreeTensor(out);
  }
}

void overwritten_while_read(Kernel& k) {
  auto a = k.load();
  Adds(k.buffer.Get<float>(), a, 1.0f, kCount);
  DataCopy(a, k.x, kCount);
}

void wait_without_set(Kernel&) { WaitFlag<HardEvent::MTE2_V>(0); }

void set_twice(Kernel&) {
  SetFlag<HardEvent::MTE2_V>(0);
  SetFlag<HardEvent::MTE2_V>(0);
}

void set_and_left(Kernel&) { SetFlag<HardEvent::V_MTE3>(3); }

void event_id(Kernel&) { SetFlag<HardEvent::V_S>(8); }

void unwritten(Kernel& k) { Adds(k.buffer.Get<float>(), k.out.AllocTensor<float>(), 1.0f, kCount); }

void part_of_a_block(Kernel& k) { DataCopy(k.in.AllocTensor<float>(), k.x, 9); }

void unaligned(Kernel& k) {
  auto b = k.buffer.Get<float>();
  Duplicate(b[4], 1.0f, 8);
}

void more_than_the_tensor(Kernel& k) { Duplicate(k.buffer.Get<float>(), 1.0f, kCount + 8); }

void count_of_zero(Kernel& k) { Duplicate(k.buffer.Get<float>(), 1.0f, 0); }

void partial_overlap(Kernel& k) {
  auto b = k.buffer.Get<float>();
  Duplicate(b, 1.0f, kCount);
  PipeBarrier<PIPE_V>();
  Adds(b[8], b, 1.0f, kCount - 8);
}

void beyond_global_memory(Kernel& k) {
  GlobalTensor<float> longer;
  longer.SetGlobalBuffer(k.x.data(), 2 * kCount);
  DataCopy(k.in.AllocTensor<float>(), longer[kCount], kCount);
}

void write_to_an_input(Kernel& k) {
  auto b = k.out.AllocTensor<float>();
  Duplicate(b, 1.0f, kCount);
  k.out.EnQue(b);
  DataCopy(k.x, k.out.DeQue<float>(), kCount);
}

void narrowing_half(Kernel& k) {
  auto a = k.load();
  Cast(k.buffer.Get<half>(kCount), a, RoundMode::CAST_CEIL, kCount);
}

void integer_without_a_mode(Kernel& k) {
  auto a = k.load();
  Cast(k.buffer.Get<std::int32_t>(), a, RoundMode::CAST_NONE, kCount);
}

void gather_outside(Kernel& k) {
  auto a = k.load();
  auto offsets = k.buffer.Get<std::int32_t>();
  ArithProgression(offsets, 0, 8, kCount);
  PipeBarrier<PIPE_V>();
  Gather(k.out.AllocTensor<float>(), a, offsets.ReinterpretCast<std::uint32_t>(), 0u, kCount);
}

const BinaryRepeatParams kDense(1, 1, 1, 8, 8, 8);

void too_many_repeats(Kernel& k) {
  auto a = k.load();
  Add(k.out.AllocTensor<float>(), a, a, 64, 256, kDense);
}

void too_many_lanes(Kernel& k) {
  auto a = k.load();
  Add(k.out.AllocTensor<float>(), a, a, 65, 1, kDense);
}

void stride_wraps_around(Kernel&) { BinaryRepeatParams(1, 1, 1, 8, 256, 8); }

void repeats_beyond_the_tensor(Kernel& k) {
  auto a = k.load();
  Add(k.out.AllocTensor<float>(), a, a, 64, 2, kDense);
}

void repeats_on_one_place(Kernel& k) {
  auto a = k.load();
  Add(k.out.AllocTensor<float>(), a, a, 8, 2, BinaryRepeatParams(1, 1, 1, 0, 1, 1));
}

void accumulate_onto_nothing(Kernel& k) {
  auto a = k.load();
  MulAddDst(k.out.AllocTensor<float>(), a, a, 64, 1, kDense);
}

void reduction_of_the_unwritten(Kernel& k) {
  WholeReduceSum(k.out.AllocTensor<float>(), k.buffer.Get<float>(), 64, 1, 1, 1, 8);
}

void broadcast_onto_itself(Kernel& k) {
  auto a = k.load();
  Brcb(a, a, 1, BrcbRepeatParams(1, 8));
}

struct Case {
  const char* name;
  void (*kernel)(Kernel&);
  int cores;
};

constexpr Case kCases[] = {
    {"correct", correct, 1},
    {"neighbours_in_global_memory", neighbours_in_global_memory, 1},
    // nothing orders two cores that write the same place
    {"race", correct, 2},
    {"second_alloc", second_alloc, 1},
    {"dequeue_of_nothing", dequeue_of_nothing, 1},
    {"enqueue_of_a_stranger", enqueue_of_a_stranger, 1},
    {"free_before_dequeue", free_before_dequeue, 1},
    {"budget", budget, 1},
    {"no_barrier", no_barrier, 1},
    {"no_event_mte2_v", no_event_mte2_v, 1},
    {"no_event_v_mte3", no_event_v_mte3, 1},
    {"no_event_v_s", no_event_v_s, 1},
    {"no_event_s_v", no_event_s_v, 1},
    {"no_event_mte3_mte2", no_event_mte3_mte2, 1},
    {"overwritten_while_read", overwritten_while_read, 1},
    {"wait_without_set", wait_without_set, 1},
    {"set_twice", set_twice, 1},
    {"set_and_left", set_and_left, 1},
    {"event_id", event_id, 1},
    {"unwritten", unwritten, 1},
    {"part_of_a_block", part_of_a_block, 1},
    {"unaligned", unaligned, 1},
    {"more_than_the_tensor", more_than_the_tensor, 1},
    {"count_of_zero", count_of_zero, 1},
    {"partial_overlap", partial_overlap, 1},
    {"beyond_global_memory", beyond_global_memory, 1},
    {"write_to_an_input", write_to_an_input, 1},
    {"narrowing_half", narrowing_half, 1},
    {"integer_without_a_mode", integer_without_a_mode, 1},
    {"gather_outside", gather_outside, 1},
    {"too_many_repeats", too_many_repeats, 1},
    {"too_many_lanes", too_many_lanes, 1},
    {"stride_wraps_around", stride_wraps_around, 1},
    {"repeats_beyond_the_tensor", repeats_beyond_the_tensor, 1},
    {"repeats_on_one_place", repeats_on_one_place, 1},
    {"accumulate_onto_nothing", accumulate_onto_nothing, 1},
    {"reduction_of_the_unwritten", reduction_of_the_unwritten, 1},
    {"broadcast_onto_itself", broadcast_onto_itself, 1},
};

std::string run(const Case& each) {
  std::vector<float> x(kCount, 3.0f), y(kCount, 0.0f);
  GlobalMemory memory;
  memory.add(x.data(), kCount * sizeof(float), false);
  memory.add(y.data(), kCount * sizeof(float), true);
  try {
    launch(each.cores, memory, [&] {
      Kernel kernel(x.data(), y.data());
      each.kernel(kernel);
    });
  } catch (const Violation& violation) {
    return violation.what();
  }
  for (float value : y)
    if (value != 6.0f) return "wrong result";
  return "";
}

}  // namespace

extern "C" const char* name_of_case(int number) {
  return number < static_cast<int>(std::size(kCases)) ? kCases[number].name : nullptr;
}

extern "C" const char* message_of(int number) {
  static std::string message;
  message = run(kCases[number]);
  return message.c_str();
}
