// Gated MLPs of which every token uses a few ("experts"): out[t] = sum over c of weights[t, c] times expert
// ids[t, c] of x[t], plus the result of an MLP that all tokens use, if there is one.
//
// The pairs of a token and one of its experts are sorted by expert, so that each expert multiplies its rows at
// once, by the tasks of gemm_tasks.h. A pair's result does not depend on the others, and a token's results are
// added in the order of its choices, so a token's result does not depend on the other tokens.
#pragma once

#include "cpu/kernels/expert_rows.h"
#include "cpu/kernels/gemm_stream.h"
#include "cpu/kernels/gemm_tasks.h"

namespace ascend_vllm {

// Weights are in panels of 16 outputs, as those of packed_linear, one expert after the other. Gates and ups of
// an expert fill `inner` / 16 panels each.
struct ExpertsArgs : ExpertChoices {
  const void* gate_up;
  const void* down;
  char* workspace;      // ExpertsMemory(args).bytes
  int64_t inner;        // a multiple of 16
  int64_t down_inputs;  // at most `inner`
  Gate gate;
};

// The parts of the workspace, as offsets in bytes; it holds a part of the tokens at a time.
struct ExpertsMemory {
  static constexpr int64_t kMostBytes = int64_t{128} << 20;
  static constexpr int64_t kMinTokens = 64;

  int64_t tokens;      // at most so many at a time
  int64_t inputs = 0;  // [pairs, hidden] floats, sorted by expert; later the results
  int64_t gated;       // [pairs, inner]
  int64_t widened;     // [pairs, inner] floats
  int64_t rows;        // ExpertRowsMemory
  int64_t bytes;

  // inlined, or all callers would share the code of one instruction set
  __attribute__((always_inline)) explicit ExpertsMemory(const ExpertsArgs& a) {
    constexpr auto aligned = ExpertRowsMemory::aligned;
    const int64_t hidden = (a.hidden + 1) / 2 * 2, element = a.dtype == DType::kFloat32 ? 4 : 2;
    const int64_t wide = a.dtype == DType::kFloat32 ? 0 : 4;
    const int64_t pair_bytes = 4 * hidden + (element + wide) * a.inner;
    const int64_t fitting = kMostBytes / (pair_bytes * (a.choices > 0 ? a.choices : 1));
    tokens = fitting > kMinTokens ? fitting : kMinTokens;
    if (tokens > a.tokens) tokens = a.tokens;
    const int64_t pairs = tokens * a.choices;
    gated = aligned(4 * hidden * pairs);
    widened = gated + aligned(element * a.inner * pairs);
    rows = widened + aligned(wide * a.inner * pairs);
    bytes = ExpertRowsMemory(rows, pairs, a.num_experts).end;
  }
};

#ifndef ASCEND_VLLM_ISA
inline int choice_for(const ExpertsArgs& args) { return choice_of(args.dtype, class_of(args.tokens)); }
#endif

ASCEND_VLLM_KERNEL(experts_mlp, ExpertsArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

namespace ascend_vllm {
namespace {

#ifdef __AMX_BF16__
// Maximum rows of a task: as many as fit into TileMemory, as those of packed_linear.
inline int64_t tile_task_rows(int64_t inputs) {
  const int64_t tiles = (inputs + kTileInputs - 1) / kTileInputs;
  const int64_t fitting = TileMemory::kPackedBytes / (tiles * kBlockBytes) * kTileBlock;
  return fitting < kMostSlicedRows ? kMostSlicedRows : std::min(fitting, kMostTaskRows);
}

// Up to so many rows of a task are not copied. Fewer than those of packed_linear: measured, tasks of 34 to 51
// rows take 0.82 to 0.89 of the time with copies, those of 26 rows are level.
constexpr int64_t kMostRowsInPlace = kTileBlock;

// Maximum panels of a task that copies its rows: half of the sums that TileMemory has for kMostSlicedRows.
constexpr int64_t kPackedPanels = TileMemory::kMostSums / (kMostSlicedRows / kTileBlock);

// The product of an expert with its rows by some panels; `call` is a number of its own.
inline void multiply_in_tiles(const LinearArgs& a, const ExpertsBlock& block, int64_t panel, int64_t panels,
                              int64_t call) {
  if (block.rows > kMostRowsInPlace) {
    TileTask(a, block.row, block.rows, panel, panels).run_packed(call);
  } else if (block.rows > kTileHeight) {
    TileTask(a, block.row, block.rows, panel, panels).run();
  } else {
    for (const int64_t end = panel + panels; panel < end; panel += kStreamPanels) {
      StreamTask(a, block.row, block.rows, panel, std::min(kStreamPanels, end - panel)).run();
    }
  }
}
#endif

// Some of the tokens, as many as the workspace holds.
template <class T>
class ExpertsStep {
 public:
  using X = typename InputOf<T>::type;

  ExpertsStep(const ExpertsArgs& args, const ExpertsMemory& memory, int64_t first, int64_t tokens)
      : a_(args),
        rows_(args, args.workspace,
              ExpertRowsMemory(memory.rows, memory.tokens * args.choices, args.num_experts), first, tokens,
              block_rows(args)),
        inputs_(reinterpret_cast<X*>(args.workspace + memory.inputs)),
        results_(reinterpret_cast<T*>(args.workspace + memory.inputs)),
        gated_(reinterpret_cast<T*>(args.workspace + memory.gated)),
        widened_(reinterpret_cast<X*>(args.workspace + memory.widened)) {}

  void run() {
    const int64_t hidden = (a_.hidden + 1) / 2 * 2, stride = is_same<T, float> ? a_.hidden : hidden;
    copy_inputs(stride);
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
      parallel_for(rows_.size(), a_.inner, [&](int64_t begin, int64_t end) {
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
    rows_.add(results_);
  }

 private:
  static int64_t block_rows([[maybe_unused]] const ExpertsArgs& args) {
#ifdef __AMX_BF16__
    if constexpr (is_same<T, bfloat16>) return tile_task_rows(std::max(args.hidden, args.inner));
#endif
    return ExpertRowsMemory::kBlockRows;
  }

  // Whether the tasks of a block copy its inputs from x themselves.
  static bool is_copied_by_task([[maybe_unused]] const ExpertsBlock& block) {
#ifdef __AMX_BF16__
    if constexpr (is_same<T, bfloat16>) return block.rows > kMostRowsInPlace;
#endif
    return false;
  }

  void copy_inputs(int64_t stride) const {
    const int64_t blocks = rows_.num_blocks(), rows = blocks == 0 ? 0 : rows_.size() / blocks;
    parallel_for(blocks, rows * stride, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const ExpertsBlock& block = rows_.block(i);
        if (is_copied_by_task(block)) continue;
        for (int64_t row = block.row; row < block.row + block.rows; ++row) {
          const T* x = static_cast<const T*>(a_.x) + rows_.token_of(row) * a_.x_stride;
          convert(x, inputs_ + row * stride, a_.hidden);
          if (stride > a_.hidden) inputs_[row * stride + a_.hidden] = X{};
        }
      }
    });
  }

  template <class From, class To>
  static void convert(const From* from, To* to, int64_t n) {
    for_lanes(
        n, [&](int64_t i) { store(to + i, load(from + i)); },
        [&](int64_t i, int rest) { store_n(to + i, load_n(from + i, rest), rest); });
  }

  // The product of each expert with its rows of x.
  void multiply(const LinearArgs& linear, const X* x, int64_t x_stride, const T* packed) {
    constexpr bool kPairs = is_same<T, bfloat16>;
    const int64_t padded = kPairs ? (linear.in_features + 1) / 2 * 2 : linear.in_features;
    const int64_t all_panels = (linear.out_features + kPanel - 1) / kPanel;
    const int64_t panels = linear.is_gated ? all_panels / 2 : all_panels;
    const int64_t work = rows_.size() * linear.in_features * linear.out_features / 8;
    int64_t most = rows_.size() <= kStreamedRows * rows_.num_blocks() ? kStreamPanels : kGroup;
#ifdef __AMX_BF16__
    static std::atomic<int64_t> calls{0};
    const int64_t call = ++calls;
    if (kPairs) most = rows_.size() > kMostRowsInPlace * rows_.num_blocks() ? kPackedPanels : kStreamPanels;
#endif
    rows_.multiply(panels, most, work, [&](const ExpertsBlock& block, int64_t panel, int64_t count) {
      LinearArgs own = linear;
      own.packed = packed + block.expert * all_panels * kPanel * padded;
#ifdef __AMX_BF16__
      if constexpr (kPairs) {
        own.x = x;
        own.x_stride = x_stride;
        if (x == inputs_ && is_copied_by_task(block)) {
          own.x = a_.x;
          own.x_stride = a_.x_stride;
          own.x_rows = rows_.row_tokens();
        } else {
          own.in_features = padded;
        }
        return multiply_in_tiles(own, block, panel, count, call);
      }
#endif
      run_wide_task<T>(own, x, x_stride, block.row, block.rows, panel, count, 0);
    });
  }

  const ExpertsArgs& a_;
  const ExpertRows rows_;
  X* const inputs_;
  T* const results_;
  T* const gated_;
  X* const widened_;
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
