// Gated MLPs of which every token uses a few ("experts"): out[t] = sum over c of weights[t, c] times expert
// ids[t, c] of x[t], plus the result of an MLP that all tokens use, if there is one.
//
// The pairs of a token and one of its experts are sorted by expert, so that each expert multiplies its rows at
// once, by the tasks of gemm_tasks.h. A pair's result does not depend on the others, and a token's results are
// added in the order of its choices, so a token's result does not depend on the other tokens.
#pragma once

#include "cpu/kernels/gemm_tasks.h"

namespace ascend_vllm {

// Weights are in panels of 16 outputs, as those of packed_linear, one expert after the other. Gates and ups of
// an expert fill `inner` / 16 panels each.
struct ExpertsArgs {
  DType dtype;
  const void* x;         // [tokens, hidden]; row t starts at t * x_stride elements
  const int32_t* ids;    // [tokens, choices]; others than these experts' add nothing
  const float* weights;  // [tokens, choices]
  const void* gate_up;
  const void* down;
  const void* shared;       // [tokens, hidden], contiguous, added; or null
  const void* shared_gate;  // [tokens], whose sigmoid `shared` is multiplied by; or null
  void* out;                // [tokens, hidden], contiguous
  char* workspace;          // ExpertsMemory(args).bytes
  int64_t tokens, hidden, x_stride, choices;
  int64_t first_expert, num_experts;
  int64_t inner;        // a multiple of 16
  int64_t down_inputs;  // at most `inner`
  Gate gate;
};

// The parts of the workspace, as offsets in bytes; it holds a part of the tokens at a time.
struct ExpertsMemory {
  static constexpr int64_t kBlockRows = 96;  // rows of a task
  static constexpr int64_t kMostBytes = int64_t{128} << 20;
  static constexpr int64_t kMinTokens = 64;

  int64_t tokens;      // at most so many at a time
  int64_t inputs = 0;  // [pairs, hidden] floats, sorted by expert; later the results
  int64_t gated;       // [pairs, inner]
  int64_t widened;     // [pairs, inner] floats
  int64_t order;       // int32 [pairs], the pair of each sorted row
  int64_t row_of;      // int32 [pairs], the sorted row of each pair, or -1
  int64_t starts;      // int32 [num_experts + 1], first sorted row of each expert
  int64_t blocks;      // ExpertsBlock
  int64_t bytes;

  // inlined, or all callers would share the code of one instruction set
  __attribute__((always_inline)) explicit ExpertsMemory(const ExpertsArgs& a) {
    const int64_t hidden = (a.hidden + 1) / 2 * 2, element = a.dtype == DType::kFloat32 ? 4 : 2;
    const int64_t wide = a.dtype == DType::kFloat32 ? 0 : 4;
    const int64_t pair_bytes = 4 * hidden + (element + wide) * a.inner;
    const int64_t fitting = kMostBytes / (pair_bytes * (a.choices > 0 ? a.choices : 1));
    tokens = fitting > kMinTokens ? fitting : kMinTokens;
    if (tokens > a.tokens) tokens = a.tokens;
    const int64_t pairs = tokens * a.choices;
    gated = aligned(4 * hidden * pairs);
    widened = gated + aligned(element * a.inner * pairs);
    order = widened + aligned(wide * a.inner * pairs);
    row_of = order + aligned(4 * pairs);
    starts = row_of + aligned(4 * pairs);
    blocks = starts + aligned(4 * (a.num_experts + 1));
    bytes = blocks + 12 * (a.num_experts + pairs / kBlockRows + 1);
  }

 private:
  static constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

// Sorted rows that one expert multiplies in one task.
struct ExpertsBlock {
  int32_t expert, row, rows;
};

#ifndef ASCEND_VLLM_ISA
inline int choice_for(const ExpertsArgs& args) {
  return choice_of(args.dtype, args.tokens <= 1 ? kOneRow : args.tokens <= kMostFewRows ? kFewRows : kManyRows);
}
#endif

ASCEND_VLLM_KERNEL(experts_mlp, ExpertsArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

namespace ascend_vllm {
namespace {

// Some of the tokens, as many as the workspace holds.
template <class T>
class ExpertsStep {
 public:
  using X = typename InputOf<T>::type;

  ExpertsStep(const ExpertsArgs& args, const ExpertsMemory& memory, int64_t first, int64_t tokens)
      : a_(args),
        first_(first),
        tokens_(tokens),
        pairs_(tokens * args.choices),
        inputs_(reinterpret_cast<X*>(args.workspace + memory.inputs)),
        results_(reinterpret_cast<T*>(args.workspace + memory.inputs)),
        gated_(reinterpret_cast<T*>(args.workspace + memory.gated)),
        widened_(reinterpret_cast<X*>(args.workspace + memory.widened)),
        order_(reinterpret_cast<int32_t*>(args.workspace + memory.order)),
        row_of_(reinterpret_cast<int32_t*>(args.workspace + memory.row_of)),
        starts_(reinterpret_cast<int32_t*>(args.workspace + memory.starts)),
        blocks_(reinterpret_cast<ExpertsBlock*>(args.workspace + memory.blocks)) {}

  void run() {
    sort();
    const int64_t hidden = (a_.hidden + 1) / 2 * 2, stride = is_same<T, float> ? a_.hidden : hidden;
    parallel_for(rows_, stride, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t token = first_ + order_[row] / a_.choices;
        convert(static_cast<const T*>(a_.x) + token * a_.x_stride, inputs_ + row * stride, a_.hidden);
        if (stride > a_.hidden) inputs_[row * stride + a_.hidden] = X{};
      }
    });
    LinearArgs linear{};
    linear.dtype = a_.dtype;
    linear.out = gated_;
    linear.out_stride = a_.inner;
    linear.in_features = a_.hidden;
    linear.out_features = 2 * a_.inner;
    linear.is_gated = true;
    linear.gate = a_.gate;
    multiply(linear, inputs_, stride, static_cast<const T*>(a_.gate_up));
    const X* inner;
    if constexpr (is_same<T, X>) {
      inner = gated_;
    } else {
      parallel_for(rows_, a_.inner, [&](int64_t begin, int64_t end) {
        convert(gated_ + begin * a_.inner, widened_ + begin * a_.inner, (end - begin) * a_.inner);
      });
      inner = widened_;
    }
    linear.out = results_;
    linear.out_stride = a_.hidden;
    linear.in_features = a_.down_inputs;
    linear.out_features = a_.hidden;
    linear.is_gated = false;
    multiply(linear, inner, a_.inner, static_cast<const T*>(a_.down));
    parallel_for(tokens_, a_.choices * a_.hidden, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) add_choices(t);
    });
  }

 private:
  template <class From, class To>
  static void convert(const From* from, To* to, int64_t n) {
    for_lanes(
        n, [&](int64_t i) { store(to + i, load(from + i)); },
        [&](int64_t i, int rest) { store_n(to + i, load_n(from + i, rest), rest); });
  }

  // Counts and places the pairs of each expert, in the order of tokens.
  void sort() {
    const int32_t* ids = a_.ids + first_ * a_.choices;
    const auto expert_of = [&](int64_t pair) {
      const int64_t expert = ids[pair] - a_.first_expert;
      return expert >= 0 && expert < a_.num_experts ? expert : -1;
    };
    std::fill_n(starts_, a_.num_experts + 1, 0);
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      if (const int64_t expert = expert_of(pair); expert >= 0) ++starts_[expert + 1];
    }
    num_blocks_ = 0;
    for (int64_t expert = 0; expert < a_.num_experts; ++expert) {
      const int32_t count = starts_[expert + 1], start = starts_[expert];
      for (int32_t row = 0; row < count; row += ExpertsMemory::kBlockRows) {
        const int32_t rows = std::min<int32_t>(count - row, ExpertsMemory::kBlockRows);
        blocks_[num_blocks_++] = {static_cast<int32_t>(expert), start + row, rows};
      }
      starts_[expert + 1] = start + count;
    }
    rows_ = starts_[a_.num_experts];
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      const int64_t expert = expert_of(pair);
      row_of_[pair] = expert < 0 ? -1 : starts_[expert]++;
      if (expert >= 0) order_[row_of_[pair]] = static_cast<int32_t>(pair);
    }
  }

  // The product of each expert with its rows of x.
  void multiply(const LinearArgs& linear, const X* x, int64_t x_stride, const T* packed) {
    constexpr bool kPairs = is_same<T, bfloat16>;
    const int64_t padded = kPairs ? (linear.in_features + 1) / 2 * 2 : linear.in_features;
    const int64_t all_panels = (linear.out_features + kPanel - 1) / kPanel;
    const int64_t panels = linear.is_gated ? all_panels / 2 : all_panels;
    const int threads = threads_for(rows_ * linear.in_features * linear.out_features / 8);
    // fewer panels per task if there would be too few tasks to balance the threads
    int64_t group = kGroup;
    while (group > 1 && num_blocks_ * ((panels + group - 1) / group) < 4 * threads) group /= 2;
    const int64_t groups = (panels + group - 1) / group;
    const auto task = [&](int64_t index) {
      const ExpertsBlock block = blocks_[index / groups];
      const int64_t panel = index % groups * group, count = std::min(group, panels - panel);
      LinearArgs own = linear;
      own.packed = packed + block.expert * all_panels * kPanel * padded;
#ifdef __AMX_BF16__
      if constexpr (kPairs) {
        own.x = x;
        own.x_stride = x_stride;
        return TileTask(own, block.row, block.rows, panel, count).run();
      }
#endif
      run_task<T>(own, x, x_stride, block.row, block.rows, panel, count);
    };
    if (threads == 1) {
      for (int64_t i = 0; i < num_blocks_ * groups; ++i) task(i);
    } else {
      run_parts(num_blocks_ * groups, threads, [&](int64_t index, int64_t) { task(index); });
    }
  }

  // The weighted sum of a token's results.
  void add_choices(int64_t t) const {
    const int32_t* rows = row_of_ + t * a_.choices;
    const float* weights = a_.weights + (first_ + t) * a_.choices;
    T* out = static_cast<T*>(a_.out) + (first_ + t) * a_.hidden;
    const T* shared =
        a_.shared == nullptr ? nullptr : static_cast<const T*>(a_.shared) + (first_ + t) * a_.hidden;
    VecF factor = set1(1.0f);
    if (a_.shared_gate != nullptr) {
      const VecF gate = set1(to_float(static_cast<const T*>(a_.shared_gate)[first_ + t]));
      factor = factor / (factor + exp(set1(0.0f) - gate));
    }
    const auto add = [&](int64_t i, const auto& load_at) {
      VecF sum = set1(0.0f);
      for (int64_t c = 0; c < a_.choices; ++c) {
        if (rows[c] >= 0) sum = fma(set1(weights[c]), load_at(results_ + rows[c] * a_.hidden + i), sum);
      }
      return shared == nullptr ? sum : fma(factor, load_at(shared + i), sum);
    };
    for_lanes(
        a_.hidden, [&](int64_t i) { store(out + i, add(i, [](const T* at) { return load(at); })); },
        [&](int64_t i, int rest) {
          store_n(out + i, add(i, [&](const T* at) { return load_n(at, rest); }), rest);
        });
  }

  const ExpertsArgs& a_;
  const int64_t first_, tokens_, pairs_;
  X* const inputs_;
  T* const results_;
  T* const gated_;
  X* const widened_;
  int32_t* const order_;
  int32_t* const row_of_;
  int32_t* const starts_;
  ExpertsBlock* const blocks_;
  int64_t rows_ = 0, num_blocks_ = 0;
};

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(experts_mlp, ExpertsArgs) {
  const ExpertsMemory memory(args);
  for (int64_t first = 0; first < args.tokens; first += memory.tokens) {
    const int64_t tokens = std::min(memory.tokens, args.tokens - first);
    with_dtype(args.dtype, [&](auto tag) { ExpertsStep<decltype(tag)>(args, memory, first, tokens).run(); });
  }
}

}  // namespace ascend_vllm

#endif
