// Mixtures of experts with quantized weights: as experts.h, with the products of quant_tasks.h. Rows are
// rounded as there, each for its expert, so a token's result does not depend on the other tokens.
//
// The macros __AVX512VNNI__ and __AMX_BF16__ make the build compile this header for those sets, too.
#pragma once

#include "cpu/kernels/expert_rows.h"
#include "cpu/kernels/quant_tasks.h"
#include "cpu/kernels/quant_token.h"

namespace ascend_vllm {

// Weights of one size, one after the other.
struct QuantizedStack {
  QuantizedLinearArgs linear;    // of the first expert; the kernel sets its rows, workspace and result
  int64_t codes, scales, zeros;  // from one expert to the next: words, bytes and bytes
};

struct Int8Stack {
  Int8LinearArgs linear;        // as above; the kernel sets its inputs, too
  const float* static_inputs;   // [experts, 2], scale and offset of all inputs; null: each row has its own
  bool has_offsets;             // inputs have offsets
  int64_t codes, scales, sums;  // from one expert to the next: words, floats and integers
};

template <class Stack>
struct StackedExpertsArgs : ExpertChoices {
  Stack gate_up, down;
  char* workspace;  // StackedExpertsMemory(args).bytes
  int64_t inner;    // width of a gated row, a multiple of 16; `down` reads at most so much of it
};
using QuantizedExpertsArgs = StackedExpertsArgs<QuantizedStack>;
using Int8ExpertsArgs = StackedExpertsArgs<Int8Stack>;

// Workspace of the inputs of some rows. Inlined, or all callers would share the code of one instruction set.
__attribute__((always_inline)) inline int64_t inputs_bytes(const QuantizedStack& stack, int64_t rows) {
  QuantizedLinearArgs linear = stack.linear;
  linear.rows = rows;
  return QuantizedInputs(linear).bytes;
}
// Also that of the rounded rows, their scales and offsets.
__attribute__((always_inline)) inline int64_t inputs_bytes(const Int8Stack& stack, int64_t rows) {
  return int8_workspace(rows, stack.linear.in_features) + rows * (8 + stack.linear.in_features);
}

// The parts of the workspace, as offsets in bytes; it holds a part of the tokens at a time.
struct StackedExpertsMemory {
  static constexpr int64_t kMostBytes = int64_t{128} << 20;
  static constexpr int64_t kMinTokens = 64;

  int64_t tokens;     // at most so many at a time
  int64_t gated = 0;  // [pairs, inner]
  int64_t results;    // [pairs, hidden]
  int64_t inputs;     // of the products
  int64_t rows;       // ExpertRowsMemory
  int64_t bytes;

  template <class Stack>
  __attribute__((always_inline)) explicit StackedExpertsMemory(const StackedExpertsArgs<Stack>& a) {
    constexpr auto aligned = ExpertRowsMemory::aligned;
    const int64_t element = a.dtype == DType::kFloat32 ? 4 : 2;
    const int64_t pair_bytes =
        element * (a.inner + a.hidden) + larger(inputs_bytes(a.gate_up, 1), inputs_bytes(a.down, 1));
    const int64_t fitting = kMostBytes / (pair_bytes * (a.choices > 0 ? a.choices : 1));
    tokens = fitting > kMinTokens ? fitting : kMinTokens;
    if (tokens > a.tokens) tokens = a.tokens;
    const int64_t pairs = tokens * a.choices;
    results = aligned(element * a.inner * pairs);
    inputs = results + aligned(element * a.hidden * pairs);
    rows = inputs + aligned(larger(inputs_bytes(a.gate_up, pairs), inputs_bytes(a.down, pairs)));
    bytes = ExpertRowsMemory(rows, pairs, a.num_experts).end;
  }

 private:
  static constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
};

#ifndef ASCEND_VLLM_ISA
// Both products of an expert use the set for the code of the first one.
inline int choice_for(const QuantizedExpertsArgs& args) {
  return choice_of(args.dtype, class_of(product_of(args.gate_up.linear), args.tokens));
}
inline int choice_for(const Int8ExpertsArgs& args) {
  return choice_of(args.dtype, class_of(kInt8ByInt8, args.tokens));
}
#endif

ASCEND_VLLM_KERNEL(quantized_experts, QuantizedExpertsArgs)
ASCEND_VLLM_KERNEL(int8_experts, Int8ExpertsArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

namespace ascend_vllm {
namespace {

static_assert(ExpertRowsMemory::kBlockRows <= kTaskRows / 2);

// The product of one expert.
template <class T>
class ExpertOfStack {
 public:
  ExpertOfStack(const QuantizedStack& stack, int64_t expert, int64_t rows, char* workspace, T* out)
      : args_(of(stack, expert, rows, workspace, out)), task_(args_) {}

  void prepare(const T* x, int64_t row) const { task_.prepare(x, row); }
  void run(const ExpertsBlock& block, int64_t panel, int64_t panels) const {
    task_.run(block.row, block.rows, panel, panels);
  }

 private:
  static QuantizedLinearArgs of(const QuantizedStack& stack, int64_t expert, int64_t rows, char* workspace,
                                T* out) {
    QuantizedLinearArgs a = stack.linear;
    a.codes += expert * stack.codes;
    a.scales = static_cast<const char*>(a.scales) + expert * stack.scales;
    if (a.zeros != nullptr) a.zeros += expert * stack.zeros;
    if (a.order != nullptr) a.order += expert * a.in_features;
    a.rows = rows;
    a.workspace = workspace;
    a.out = out;
    return a;
  }

  const QuantizedLinearArgs args_;
  const QuantizedTask<T> task_;
};

template <class T>
class Int8ExpertOfStack {
 public:
  Int8ExpertOfStack(const Int8Stack& stack, int64_t expert, int64_t rows, char* workspace, T* out)
      : q_(reinterpret_cast<int8_t*>(workspace) + int8_workspace(rows, stack.linear.in_features) + 8 * rows),
        scales_(reinterpret_cast<float*>(q_ - 8 * rows)),
        offsets_(reinterpret_cast<int32_t*>(q_ - 4 * rows)),
        static_inputs_(stack.static_inputs == nullptr ? nullptr : stack.static_inputs + 2 * expert),
        has_offsets_(stack.has_offsets),
        args_(of(stack, expert, rows, workspace, out)),
        task_(args_) {}

  void prepare(const T* x, int64_t row) const {
    QuantizeTokensArgs tokens{};
    tokens.dtype = args_.dtype;
    tokens.x = x;
    tokens.q = q_ + row * args_.in_features;
    tokens.scales = scales_ + row;
    tokens.offsets = offsets_ + row;
    tokens.in_features = args_.in_features;
    tokens.kind = static_inputs_ != nullptr ? TokenScale::kStatic
                  : has_offsets_            ? TokenScale::kOffset
                                            : TokenScale::kSymmetric;
    if (static_inputs_ != nullptr) {
      tokens.static_scale = static_inputs_[0];
      tokens.static_offset = static_cast<int32_t>(static_inputs_[1]);
    }
    quantize_row<T>(tokens, 0);
    task_.prepare(tokens.q, row);
  }
  void run(const ExpertsBlock& block, int64_t panel, int64_t panels) const {
    task_.run(block.row, block.rows, panel, panels);
  }

 private:
  Int8LinearArgs of(const Int8Stack& stack, int64_t expert, int64_t rows, char* workspace, T* out) const {
    Int8LinearArgs a = stack.linear;
    a.q_scales = scales_;
    a.q_offsets = has_offsets_ ? offsets_ : nullptr;
    a.codes += expert * stack.codes;
    a.scales += expert * stack.scales;
    if (a.sums != nullptr) a.sums += expert * stack.sums;
    a.rows = rows;
    a.workspace = workspace;
    a.out = out;
    return a;
  }

  int8_t* const q_;
  float* const scales_;
  int32_t* const offsets_;
  const float* const static_inputs_;
  const bool has_offsets_;
  const Int8LinearArgs args_;
  const Int8Task<T> task_;
};

// Some of the tokens, as many as the workspace holds; `Expert` is one of the classes above.
template <class T, class Expert, class Stack>
class StackedExpertsStep {
 public:
  StackedExpertsStep(const StackedExpertsArgs<Stack>& args, const StackedExpertsMemory& memory, int64_t first,
                     int64_t tokens)
      : a_(args),
        pairs_(memory.tokens * args.choices),
        rows_(args, args.workspace, ExpertRowsMemory(memory.rows, pairs_, args.num_experts), first, tokens),
        gated_(reinterpret_cast<T*>(args.workspace + memory.gated)),
        results_(reinterpret_cast<T*>(args.workspace + memory.results)),
        inputs_(args.workspace + memory.inputs) {}

  void run() const {
    multiply(a_.gate_up, gated_,
             [&](int64_t row) { return static_cast<const T*>(a_.x) + rows_.token_of(row) * a_.x_stride; });
    multiply(a_.down, results_, [&](int64_t row) { return gated_ + row * a_.inner; });
    rows_.add(results_);
  }

 private:
  template <class Input>
  void multiply(const Stack& stack, T* out, const Input& input_of) const {
    const auto& linear = stack.linear;
    parallel_for(rows_.size(), linear.in_features, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        Expert(stack, rows_.expert_of(row), pairs_, inputs_, out).prepare(input_of(row), row);
      }
    });
    const int64_t all_panels = (linear.out_features + kPanel - 1) / kPanel;
    const int64_t most = rows_.size() <= kFewQuantizedRows * rows_.num_blocks() ? kStreamPanels : kGroup;
    rows_.multiply(linear.is_gated ? all_panels / 2 : all_panels, most,
                   rows_.size() * linear.in_features * linear.out_features / 8,
                   [&](const ExpertsBlock& block, int64_t panel, int64_t panels) {
                     Expert(stack, block.expert, pairs_, inputs_, out).run(block, panel, panels);
                   });
  }

  const StackedExpertsArgs<Stack>& a_;
  const int64_t pairs_;
  const ExpertRows rows_;
  T* const gated_;
  T* const results_;
  char* const inputs_;
};

template <template <class> class Expert, class Stack>
void run_experts(const StackedExpertsArgs<Stack>& args) {
  const StackedExpertsMemory memory(args);
  for (int64_t first = 0; first < args.tokens; first += memory.tokens) {
    const int64_t tokens = std::min(memory.tokens, args.tokens - first);
    with_dtype(args.dtype, [&](auto tag) {
      using T = decltype(tag);
      StackedExpertsStep<T, Expert<T>, Stack>(args, memory, first, tokens).run();
    });
  }
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(quantized_experts, QuantizedExpertsArgs) { run_experts<ExpertOfStack>(args); }

ASCEND_VLLM_DEFINE_KERNEL(int8_experts, Int8ExpertsArgs) { run_experts<Int8ExpertOfStack>(args); }

}  // namespace ascend_vllm

#endif
