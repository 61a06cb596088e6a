// The rows of a mixture of experts: pairs of a token and one of its experts, sorted by expert, so that each
// expert multiplies its rows at once; and the weighted sums of a token's results, in the order of its choices.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

// The tokens, their experts, and what is added to the experts' results.
struct ExpertChoices {
  DType dtype;
  const void* x;            // [tokens, hidden]; row t starts at t * x_stride elements
  const int32_t* ids;       // [tokens, choices]; others than these experts' add nothing
  const float* weights;     // [tokens, choices]
  const void* shared;       // [tokens, hidden], contiguous, added; or null
  const void* shared_gate;  // [tokens], whose sigmoid `shared` is multiplied by; or null
  void* out;                // [tokens, hidden], contiguous
  int64_t tokens, hidden, x_stride, choices;
  int64_t first_expert, num_experts;
};

// Sorted rows that one expert multiplies in one task.
struct ExpertsBlock {
  int32_t expert, row, rows;
};

// Parts of a workspace for a number of pairs, as offsets in bytes from `begin`.
struct ExpertRowsMemory {
  static constexpr int64_t kBlockRows = 96;  // least rows of a full task

  int64_t order;   // int32 [pairs], the pair of each sorted row
  int64_t tokens;  // int32 [pairs], its token
  int64_t row_of;  // int32 [pairs], the sorted row of each pair, or -1
  int64_t starts;  // int32 [num_experts + 1], first sorted row of each expert
  int64_t blocks;  // ExpertsBlock
  int64_t end;

  // inlined, or all callers would share the code of one instruction set
  __attribute__((always_inline)) ExpertRowsMemory(int64_t begin, int64_t pairs, int64_t num_experts) {
    order = begin;
    tokens = order + aligned(4 * pairs);
    row_of = tokens + aligned(4 * pairs);
    starts = row_of + aligned(4 * pairs);
    blocks = starts + aligned(4 * (num_experts + 1));
    end = blocks + aligned(12 * (num_experts + pairs / kBlockRows + 1));
  }

  static constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

// Some of the tokens.
class ExpertRows {
 public:
  // block_rows: maximum rows of a task, at least ExpertRowsMemory::kBlockRows.
  ExpertRows(const ExpertChoices& choices, char* workspace, const ExpertRowsMemory& memory, int64_t first,
             int64_t tokens, int64_t block_rows = ExpertRowsMemory::kBlockRows)
      : a_(choices),
        first_(first),
        tokens_(tokens),
        pairs_(tokens * choices.choices),
        order_(reinterpret_cast<int32_t*>(workspace + memory.order)),
        row_tokens_(reinterpret_cast<int32_t*>(workspace + memory.tokens)),
        row_of_(reinterpret_cast<int32_t*>(workspace + memory.row_of)),
        starts_(reinterpret_cast<int32_t*>(workspace + memory.starts)),
        blocks_(reinterpret_cast<ExpertsBlock*>(workspace + memory.blocks)) {
    sort(static_cast<int32_t>(block_rows));
  }

  int64_t size() const { return rows_; }
  // Index of a row's token.
  int64_t token_of(int64_t row) const { return row_tokens_[row]; }
  // Of all rows.
  const int32_t* row_tokens() const { return row_tokens_; }
  // Of a row, counted from the first one here.
  int64_t expert_of(int64_t row) const { return a_.ids[first_ * a_.choices + order_[row]] - a_.first_expert; }
  int64_t num_blocks() const { return num_blocks_; }
  const ExpertsBlock& block(int64_t index) const { return blocks_[index]; }

  // Calls task(block, panel, count) for all blocks and panels, at most `most` panels in a task.
  template <class Task>
  void multiply(int64_t panels, int64_t most, int64_t work, const Task& task) const {
    const int threads = threads_for(work);
    // fewer panels per task if there would be too few tasks to balance the threads
    int64_t group = most;
    while (group > 1 && num_blocks_ * ((panels + group - 1) / group) < 4 * threads) group /= 2;
    const int64_t groups = (panels + group - 1) / group;
    const auto run = [&](int64_t index) {
      const int64_t part = part_in_turn(index, num_blocks_ * groups, threads), panel = part % groups * group;
      task(blocks_[part / groups], panel, std::min(group, panels - panel));
    };
    if (threads == 1) {
      for (int64_t i = 0; i < num_blocks_ * groups; ++i) run(i);
    } else {
      run_parts(num_blocks_ * groups, threads, [&](int64_t index, int64_t) { run(index); });
    }
  }

  // Writes each token's weighted sum of the rows' results [rows, hidden].
  template <class T>
  void add(const T* results) const {
    parallel_for(tokens_, a_.choices * a_.hidden, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) add_choices(results, t);
    });
  }

 private:
  // Counts and places the pairs of each expert, in the order of tokens.
  void sort(int32_t block_rows) {
    const int32_t* ids = a_.ids + first_ * a_.choices;
    const auto expert_of = [&](int64_t pair) {
      const int64_t expert = ids[pair] - a_.first_expert;
      return expert >= 0 && expert < a_.num_experts ? expert : -1;
    };
    std::fill_n(starts_, a_.num_experts + 1, 0);
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      if (const int64_t expert = expert_of(pair); expert >= 0) ++starts_[expert + 1];
    }
    for (int64_t expert = 0; expert < a_.num_experts; ++expert) {
      const int32_t count = starts_[expert + 1], start = starts_[expert];
      for (int32_t row = 0; row < count; row += block_rows) {
        const int32_t rows = std::min(count - row, block_rows);
        blocks_[num_blocks_++] = {static_cast<int32_t>(expert), start + row, rows};
      }
      starts_[expert + 1] = start + count;
    }
    rows_ = starts_[a_.num_experts];
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      const int64_t expert = expert_of(pair);
      row_of_[pair] = expert < 0 ? -1 : starts_[expert]++;
      if (expert < 0) continue;
      order_[row_of_[pair]] = static_cast<int32_t>(pair);
      row_tokens_[row_of_[pair]] = static_cast<int32_t>(first_ + pair / a_.choices);
    }
  }

  template <class T>
  void add_choices(const T* results, int64_t t) const {
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
    const auto sum_of = [&](int64_t i, const auto& load_at) {
      VecF sum = set1(0.0f);
      for (int64_t c = 0; c < a_.choices; ++c) {
        if (rows[c] >= 0) sum = fma(set1(weights[c]), load_at(results + rows[c] * a_.hidden + i), sum);
      }
      return shared == nullptr ? sum : fma(factor, load_at(shared + i), sum);
    };
    for_lanes(
        a_.hidden, [&](int64_t i) { store(out + i, sum_of(i, [](const T* at) { return load(at); })); },
        [&](int64_t i, int rest) {
          store_n(out + i, sum_of(i, [&](const T* at) { return load_n(at, rest); }), rest);
        });
  }

  const ExpertChoices& a_;
  const int64_t first_, tokens_, pairs_;
  int32_t* const order_;
  int32_t* const row_tokens_;
  int32_t* const row_of_;
  int32_t* const starts_;
  ExpertsBlock* const blocks_;
  int64_t rows_ = 0, num_blocks_ = 0;
};

}  // namespace
}  // namespace ascend_vllm

#endif
