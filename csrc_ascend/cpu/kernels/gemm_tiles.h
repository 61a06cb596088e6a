// The bfloat16 products of gemm_tasks.h with AMX tiles: blocks of 32 rows by two panels, which are four tiles
// of sums. A tile of inputs has 16 rows of 32, a tile of weights 16 pairs of inputs by 16 outputs, as panels
// have them.
//
// Every output is one chain of tile products in the order of the inputs, whatever the number of rows and
// threads, so a row's result does not depend on the other rows. Subnormal numbers are treated as zero, as the
// hardware does.
//
// Many rows are copied tile by tile for the L2 cache and multiplied slice by slice of the inputs: then a pair
// of panels stays in the L1 cache, and everything else passes by it. Prefetching and writing results take place
// between the products, which leave most of the processor idle.
#pragma once

#ifdef __AMX_BF16__

#include <atomic>

#include "cpu/isa/tiles.h"
#include "cpu/kernels/gemm_tile_blocks.h"

namespace ascend_vllm {
namespace {

// Up to so many rows are not copied, since reading the weights takes longer than multiplying by them.
constexpr int64_t kMostDirectRows = 64;
// Tiles of inputs of a slice: those of a pair of panels take two thirds of the L1 cache.
constexpr int64_t kSliceSteps = 16;
// Lines of a block's sums that are prefetched in a step: all of them in a slice.
constexpr int64_t kStepSumLines = kBlockSums / kPanel / kSliceSteps;
// Weights of a task for few rows, in bytes, unless there would be too few tasks for the threads.
constexpr int64_t kDirectBytes = 1 << 18;
// Tasks of a thread, so that one that is delayed does not delay them all; packing takes time in each.
constexpr int64_t kDirectTasks = 4, kPackedTasks = 2;
// How far weights are prefetched for a single block of rows, in tiles. For several ones it is a pair of panels,
// unless they have more tiles than kSpreadSteps.
constexpr int64_t kAheadSteps = 8, kSpreadSteps = 64;
// Rows of a task: as many as fit into the memory below, or so many of them if not all of their inputs do.
constexpr int64_t kMostTaskRows = 512, kMostSlicedRows = 256;

// A thread's memory for tasks of many rows: a large part of its L2 cache.
struct TileMemory {
  static constexpr int64_t kPackedBytes = 1 << 20;
  static constexpr int64_t kMostSums = 256;  // blocks

  alignas(64) char packed[kPackedBytes];
  alignas(64) float sums[kMostSums * kBlockSums];
  int64_t call = 0, row = 0;  // whose rows `packed` has
};

// This thread's, made when first used.
inline TileMemory& tile_memory() {
  struct Owner {
    TileMemory* const memory = new TileMemory;
    ~Owner() { delete memory; }
  };
  thread_local const Owner owner;
  return *owner.memory;
}

// Prefetches tiles of two panels, some lines of both at a time: the tiles [begin, end) of one pair, then [0,
// rest) of the next one. kHint: into which caches.
template <_mm_hint kHint>
class PanelFetch {
 public:
  PanelFetch(const PanelPair& pair, int64_t begin, int64_t end, const PanelPair& next = {}, int64_t rest = 0)
      : pair_(pair.from(begin)), next_(next), lines_((end - begin) * kTileHeight), rest_(rest * kTileHeight) {}

  [[gnu::always_inline]] void some(int64_t count) {
    for (; count > 0; --count) {
      if (lines_ == 0) {
        if (rest_ == 0) return;
        pair_ = next_;
        lines_ = rest_;
        rest_ = 0;
      }
      _mm_prefetch(pair_.first, kHint);
      _mm_prefetch(pair_.second, kHint);
      pair_.first += kTileInputs;
      pair_.second += kTileInputs;
      --lines_;
    }
  }

  void all() { some(lines_ + rest_); }

 private:
  PanelPair pair_, next_;
  int64_t lines_, rest_;
};

// Prefetches the rows of a block into the L2 cache, a tile of inputs at a time.
class RowFetch {
 public:
  RowFetch(const TaskRows& rows, int64_t block, int64_t tile, bool is_used)
      : rows_(rows), first_(rows.first_row(block)), byte_(tile * kTileRowBytes), is_used_(is_used) {}

  [[gnu::always_inline]] void step() {
    if (!is_used_) return;
    for (int64_t r = 0; r < kTileBlock; ++r) _mm_prefetch(rows_.at(first_ + r) + byte_, _MM_HINT_T1);
    byte_ += kTileRowBytes;
  }

 private:
  const TaskRows& rows_;
  const int64_t first_;
  int64_t byte_;
  const bool is_used_;
};

// Tiles 0 to 3 are sums: those of the first rows by both panels, then those of the second ones; 4 and 5 are
// inputs, 6 and 7 weights. Only the first panel is loaded through the L1 cache, from which the others would
// remove it. `aside` is called in every step.
template <int kRowTiles, class Aside>
inline void add_products(InputTiles x, PanelPair w, int64_t steps, const Aside& aside) {
  for (; steps > 0; --steps) {
    _tile_stream_loadd(4, x.first, x.row_bytes);
    _tile_loadd(6, w.first, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRowTiles == 2) {
      _tile_stream_loadd(5, x.second, x.row_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stream_loadd(7, w.second, kTileRowBytes);
    aside();
    if constexpr (kRowTiles == 2) _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(1, 4, 7);
    x = x.from(1);
    w = w.from(1);
  }
}

// The same in parts: on Granite Rapids, storing a tile takes 900 cycles longer if none was stored for
// 2,000 cycles.
template <int kRowTiles, class Aside>
inline void add_slice(const InputTiles& x, const PanelPair& w, int64_t steps, const Aside& aside) {
  constexpr int64_t kMostSteps = 16;
  alignas(64) char unused[kTileBytes];
  int64_t step = 0;
  for (; step + kMostSteps < steps; step += kMostSteps) {
    add_products<kRowTiles>(x.from(step), w.from(step), kMostSteps, aside);
    _tile_stored(7, unused, kTileRowBytes);
  }
  add_products<kRowTiles>(x.from(step), w.from(step), steps - step, aside);
}

// The same for a slice of many rows, with both panels in the L1 cache.
template <class Aside>
inline void add_kept_slice(InputTiles x, PanelPair w, int64_t steps, const Aside& aside) {
  for (; steps > 0; --steps) {
    _tile_stream_loadd(4, x.first, x.row_bytes);
    _tile_stream_loadd(5, x.second, x.row_bytes);
    _tile_loadd(6, w.first, kTileRowBytes);
    _tile_loadd(7, w.second, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    aside();
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    x = x.from(1);
    w = w.from(1);
  }
}

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void load_sums(const float* sums) {
  _tile_stream_loadd(0, sums, kSumsRowBytes);
  _tile_stream_loadd(1, sums + kPanel, kSumsRowBytes);
  _tile_stream_loadd(2, sums + kTileHeight * kSumsRow, kSumsRowBytes);
  _tile_stream_loadd(3, sums + kTileHeight * kSumsRow + kPanel, kSumsRowBytes);
}

template <int kRowTiles>
inline void store_sums(float* sums) {
  _tile_stored(0, sums, kSumsRowBytes);
  _tile_stored(1, sums + kPanel, kSumsRowBytes);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, sums + kTileHeight * kSumsRow, kSumsRowBytes);
    _tile_stored(3, sums + kTileHeight * kSumsRow + kPanel, kSumsRowBytes);
  }
  finish_writes();
}

// What a step does besides its products: a block's share of prefetching, and results of the block before.
template <class Fetch>
struct Aside {
  Fetch& fetch;
  BlockWriter& writer;
  const int64_t lines;

  Aside(Fetch& panels, BlockWriter& results, int64_t blocks)
      : fetch(panels), writer(results), lines((kTileHeight + blocks - 1) / blocks) {}

  [[gnu::always_inline]] void operator()() const {
    fetch.some(lines);
    writer.step();
  }
};

// Rows [row, row + rows) by the panels [panel, panel + panels), or by so many panels of both halves if gated.
class TileTask {
 public:
  TileTask(const LinearArgs& args, int64_t row, int64_t rows, int64_t panel, int64_t panels)
      : a_(args),
        panel_(panel),
        panels_(panels),
        pairs_((panels + 1) / 2 * (args.is_gated ? 2 : 1)),
        steps_(args.in_features / kTileInputs),
        all_steps_((args.in_features + kTileInputs - 1) / kTileInputs),
        panel_size_((args.in_features + 1) / 2 * 2 * kPanel),
        rows_(args, row, rows),
        writer_(args, rows_) {}

  // At most TileMemory::kMostSums blocks of rows, which are read where x has them.
  void run() { rows_.count() <= kTileHeight ? run_direct<1>() : run_direct<2>(); }

  // At least 32 rows, by way of a copy, which later tasks of the same call may use; `call` is a number of its
  // own. If the copy has one slice at a time, there are at most TileMemory::kMostSums blocks by pairs.
  void run_packed(int64_t call) {
    const Tiles tiles;
    const bool keeps_all = rows_.packed_bytes(all_steps_) <= TileMemory::kPackedBytes;
    const bool has_all = keeps_all && memory_.call == call && memory_.row == rows_.row();
    memory_.call = keeps_all ? call : 0;
    memory_.row = rows_.row();
    const Order order{pairs_, slices_of(all_steps_), all_steps_, keeps_all};
    PanelFetch<_MM_HINT_T1>(pair(0), order.at(0).begin, order.at(0).end).all();
    for (int64_t i = 0; i < order.count(); ++i) {
      const Place now = order.at(i);
      multiply_place(now, order.at(i + 1), keeps_all, now.pair == 0 && !has_all);
      if (now.end == all_steps_ && !(a_.is_gated && now.pair % 2 == 0)) {
        const int64_t panel = panel_of(now.pair), steps = keeps_all ? steps_ : now.end - now.begin;
        writer_.take((panel_ + panel) * kPanel, panels_ - panel, a_.is_gated ? 2 * steps : steps,
                     kept_sums(now.pair, keeps_all),
                     a_.is_gated ? kept_sums(now.pair - 1, keeps_all) : nullptr);
      }
    }
    writer_.finish();
  }

  static int64_t slices_of(int64_t steps) {
    return std::max<int64_t>(1, (steps + kSliceSteps - 1) / kSliceSteps);
  }

 private:
  // A pair by the tiles [begin, end) of the inputs.
  struct Place {
    int64_t pair, begin, end;
  };

  // Slices of one pair after another if all inputs are kept, or else the pairs by one slice after another.
  struct Order {
    int64_t pairs, slices, steps;
    bool keeps_all;

    int64_t count() const { return pairs * slices; }
    Place at(int64_t i) const {
      if (i >= count()) return {0, 0, 0};
      const int64_t slice = keeps_all ? i % slices : i / pairs;
      return {keeps_all ? i / slices : i % pairs, steps * slice / slices, steps * (slice + 1) / slices};
    }
  };

  // With gates, every pair is followed by that of the other half.
  PanelPair pair(int64_t index) const {
    const int64_t half = a_.is_gated ? index % 2 * (a_.out_features / 2 / kPanel) : 0;
    const bfloat16* first =
        static_cast<const bfloat16*>(a_.packed) + (panel_ + panel_of(index) + half) * panel_size_;
    return {first, panel_of(index) + 1 < panels_ ? first + panel_size_ : first};
  }

  // The pair's first panel of the task.
  int64_t panel_of(int64_t index) const { return a_.is_gated ? index / 2 * 2 : index * 2; }

  float* sums_of(int64_t index, int64_t block) const {
    return memory_.sums + (index * rows_.blocks() + block) * kBlockSums;
  }

  // Sums of all blocks by a pair: until they are written, those of further pairs follow.
  float* kept_sums(int64_t index, bool keeps_all) const {
    return sums_of(keeps_all ? index & (a_.is_gated ? 3 : 1) : index, 0);
  }

  // All blocks; packs: first copies their inputs.
  void multiply_place(const Place& now, const Place& next, bool keeps_all, bool packs) {
    const int64_t steps = now.end - now.begin, whole = std::min(now.end, steps_) - now.begin;
    const int64_t lines = (kTileHeight + rows_.blocks() - 1) / rows_.blocks();
    PanelFetch<_MM_HINT_T1> panels(pair(next.pair), next.begin, next.end);
    float* sums = kept_sums(now.pair, keeps_all);
    PanelRest rest;
    if (whole < steps) rest.copy(pair(now.pair).from(steps_), a_.in_features % kTileInputs);
    for (int64_t block = 0; block < rows_.blocks(); ++block, sums += kBlockSums) {
      char* copy = memory_.packed + block * (keeps_all ? all_steps_ : steps) * kBlockBytes +
                   (keeps_all ? now.begin * kBlockBytes : 0);
      // the inputs that are copied next
      const bool is_last = block + 1 == rows_.blocks();
      RowFetch rows(rows_, is_last ? 0 : block + 1, is_last ? next.begin : now.begin, packs);
      if (packs) rows_.pack(block, now.begin, now.end, copy);
      const float* next_sums = sums + kBlockSums;
      now.begin == 0 ? zero_sums() : load_sums(sums);
      add_kept_slice(TaskRows::packed(copy), pair(now.pair).from(now.begin), whole,
                     [&]() __attribute__((always_inline)) {
                       panels.some(lines);
                       rows.step();
                       for (int64_t i = 0; i < kStepSumLines; ++i, next_sums += kPanel)
                         _mm_prefetch(next_sums, _MM_HINT_T0);
                       writer_.step();
                     });
      if (whole < steps) add_products<2>(TaskRows::packed(copy).from(whole), rest.panels(), 1, [] {});
      store_sums<2>(sums);
    }
  }

  template <int kRowTiles>
  void run_direct() {
    TileShapes shapes;
    if constexpr (kRowTiles == 1) {
      for (const int tile : {0, 1, 4}) shapes.rows[tile] = static_cast<uint8_t>(rows_.count());
    }
    const Tiles tiles(shapes);
    // the next pair while all blocks are multiplied, or else the tiles that follow while the first block is
    if (rows_.blocks() > 1 && steps_ <= kSpreadSteps) {
      multiply_direct<kRowTiles, _MM_HINT_T1>(steps_, rows_.blocks());
    } else {
      multiply_direct<kRowTiles, _MM_HINT_T0>(std::min(steps_, kAheadSteps), 1);
    }
  }

  // Weights are prefetched `ahead` tiles before they are needed, during the first `blocks` blocks.
  template <int kRowTiles, _mm_hint kHint>
  void multiply_direct(int64_t ahead, int64_t blocks) {
    PanelFetch<kHint>(pair(0), 0, ahead).all();
    for (int64_t i = 0; i < pairs_; ++i) {
      const bool is_last = i + 1 == pairs_;
      PanelFetch<kHint> fetch(pair(i), ahead, steps_, pair(is_last ? i : i + 1), is_last ? 0 : ahead);
      const Aside aside(fetch, writer_, blocks);
      for (int64_t block = 0; block < rows_.blocks(); ++block) {
        zero_sums();
        add_slice<kRowTiles>(rows_.direct(block), pair(i), steps_, aside);
        finish_block<kRowTiles>(block, i, sums_of(0, block), sums_of(0, block));
      }
    }
    writer_.finish();
  }

  // Adds the rest of the inputs and hands the sums to the writer; those of gates are kept in `sums` until those
  // of the other half follow.
  template <int kRowTiles>
  void finish_block(int64_t block, int64_t index, float* sums, const float* gates) {
    add_rest<kRowTiles>(block, index);
    if (a_.is_gated && index % 2 == 0) {
      writer_.finish_block();
      store_sums<kRowTiles>(sums);
    } else {
      const int64_t panel = panel_of(index);
      store_sums<kRowTiles>(writer_.next(block, (panel_ + panel) * kPanel, panels_ - panel, gates));
    }
  }

  template <int kRowTiles>
  void add_rest(int64_t block, int64_t index) const {
    const int64_t done = steps_ * kTileInputs;
    if (done == a_.in_features) return;
    const TileRest rest(rows_.direct(block).from(steps_), std::min(rows_.count(), kTileHeight),
                        a_.in_features - done);
    PanelRest weights;
    weights.copy(pair(index).from(steps_), a_.in_features - done);
    add_products<kRowTiles>(rest.rows(), weights.panels(), 1, [] {});
  }

  const LinearArgs& a_;
  const int64_t panel_, panels_, pairs_, steps_, all_steps_, panel_size_;
  const TaskRows rows_;
  TileMemory& memory_ = tile_memory();
  BlockWriter writer_;
};

// Tasks of a product: every thread stays with its rows, which it has copied, as long as these have any left.
class TaskQueue {
 public:
  struct Task {
    int64_t rows, pairs;
  };

  TaskQueue(int64_t row_tasks, int64_t groups) : row_tasks_(row_tasks), groups_(groups) {}

  // To be called as often as there are tasks.
  Task take(int64_t thread) {
    if (row_tasks_ > kMost) {
      const int64_t index = taken_[0]++;
      return {index / groups_, index % groups_};
    }
    for (int64_t rows = thread % row_tasks_;; rows = (rows + 1) % row_tasks_) {
      if (const int64_t pairs = taken_[rows]++; pairs < groups_) return {rows, pairs};
    }
  }

 private:
  static constexpr int64_t kMost = 64;

  const int64_t row_tasks_, groups_;
  std::atomic<int64_t> taken_[kMost] = {};
};

inline void multiply_in_tiles(const LinearArgs& a) {
  if (a.rows == 0 || a.out_features == 0) return;
  const int64_t all = (a.out_features + kPanel - 1) / kPanel, panels = a.is_gated ? all / 2 : all;
  const int64_t pairs = (panels + 1) / 2, sums_of_pair = a.is_gated ? 2 : 1;
  const int64_t steps = (a.in_features + kTileInputs - 1) / kTileInputs;
  const int threads = threads_for(a.rows * a.in_features * a.out_features / 8);
  const bool is_direct = a.rows <= kMostDirectRows;
  int64_t row_tasks = 1, groups = kDirectTasks * threads;
  if (is_direct) {
    groups = std::max(groups, pairs * sums_of_pair * steps * 2 * kTileBytes / kDirectBytes);
  } else {
    const int64_t fitting = TileMemory::kPackedBytes / std::max<int64_t>(1, steps * kBlockBytes) * kTileBlock;
    const int64_t most_rows = fitting < kMostSlicedRows ? kMostSlicedRows : std::min(fitting, kMostTaskRows);
    row_tasks = (a.rows + most_rows - 1) / most_rows;
    const int64_t blocks = ((a.rows + row_tasks - 1) / row_tasks + kTileBlock - 1) / kTileBlock;
    const int64_t tasks = fitting < kMostSlicedRows ? threads : kPackedTasks * threads;
    groups = (tasks + row_tasks - 1) / row_tasks;
    if (fitting < kMostSlicedRows) {
      const int64_t most_pairs = TileMemory::kMostSums / (blocks * sums_of_pair);
      groups = std::max(groups, (pairs + most_pairs - 1) / most_pairs);
    }
  }
  if (row_tasks % threads != 0) groups = (groups + threads - 1) / threads * threads;
  groups = std::min(groups, pairs);
  static std::atomic<int64_t> calls{0};
  const int64_t call = ++calls;
  TaskQueue queue(row_tasks, groups);
  const auto task = [&](int64_t, int64_t thread) {
    const auto [of_rows, of_pairs] = queue.take(thread);
    const int64_t row = a.rows * of_rows / row_tasks, end = a.rows * (of_rows + 1) / row_tasks;
    const int64_t panel = pairs * of_pairs / groups * 2;
    const int64_t last = std::min(panels, pairs * (of_pairs + 1) / groups * 2);
    TileTask work(a, row, end - row, panel, last - panel);
    is_direct ? work.run() : work.run_packed(call);
  };
  if (threads == 1) {
    for (int64_t i = 0; i < row_tasks * groups; ++i) task(i, 0);
  } else {
    run_parts(row_tasks * groups, threads, task);
  }
}

}  // namespace
}  // namespace ascend_vllm

#endif
