// Divides a step of paged attention into work items; included by the binding only, so it is compiled once.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/kernels/paged_attention.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

// Keys of a split: long enough that merging costs nothing, short enough that one long sequence feeds many
// cores.
constexpr int64_t kSplitKeys = 512;
// Minimum items per thread for a balanced load.
constexpr int64_t kItemsPerThread = 8;
constexpr int64_t kLeastTileRows = 32;

// Reuses its memory from step to step.
class PagedPlan {
 public:
  std::vector<PagedItem> items;
  std::vector<PagedMerge> merges;
  int64_t part_floats = 0;
  int threads = 1;

  // Reads the shapes of `args`, query_start and seq_lens. threads: 0 to choose by the amount of work.
  void make(const PagedAttentionArgs& args, int64_t num_sequences, int wanted_threads) {
    items.clear();
    merges.clear();
    part_floats = 0;
    args_ = &args;
    group_ = args.heads / args.cache.kv_heads;
    int64_t work = 0, rows = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
      work += args.cache.kv_heads * work_of(s, 0, rows_of(s));
      rows += rows_of(s);
    }
    threads = wanted_threads > 0 ? wanted_threads : threads_for(work);
    tile_rows_ = kPagedTileRows;
    while (threads > 1 && tile_rows_ > kLeastTileRows &&
           rows * args.cache.kv_heads < kItemsPerThread * threads * tile_rows_) {
      tile_rows_ /= 2;
    }
    // splitting pays for an item that is a large part of a thread's work
    split_work_ = work / (4 * threads);
    // large items first, so that small ones balance the threads at the end
    for (int64_t s = 0; s < num_sequences; ++s) {
      if (rows_of(s) > kPagedTileRows) add_sequence(s);
    }
    for (int64_t s = 0; s < num_sequences; ++s) {
      if (rows_of(s) > 0 && rows_of(s) <= kPagedTileRows) add_sequence(s);
    }
  }

 private:
  int64_t tokens_of(int64_t s) const { return args_->query_start[s + 1] - args_->query_start[s]; }
  int64_t rows_of(int64_t s) const { return tokens_of(s) * group_; }
  int64_t position_of(int64_t s, int64_t row) const { return args_->seq_lens[s] - tokens_of(s) + row / group_; }
  int64_t key_begin_of(int64_t s, int64_t row) const {
    return args_->window > 0 ? std::max<int64_t>(0, position_of(s, row) - args_->window + 1) : 0;
  }
  int64_t key_end_of(int64_t s, int64_t row) const { return position_of(s, row) + 1; }

  // Work of rows begin … end-1 of one KV head, in vectors of eight multiplications.
  int64_t work_of(int64_t s, int64_t begin, int64_t end) const {
    if (begin == end) return 0;
    const int64_t first = key_end_of(s, begin) - key_begin_of(s, begin);
    const int64_t last = key_end_of(s, end - 1) - key_begin_of(s, end - 1);
    return (end - begin) * (first + last) / 2 * args_->cache.head_size / 4;
  }

  void add_sequence(int64_t s) {
    const int64_t rows = rows_of(s);
    for (int64_t begin = (rows - 1) / tile_rows_ * tile_rows_; begin >= 0; begin -= tile_rows_) {
      const int64_t end = std::min(begin + tile_rows_, rows);
      PagedItem item{};
      item.sequence = static_cast<int32_t>(s);
      item.row_begin = static_cast<int32_t>(begin);
      item.row_end = static_cast<int32_t>(end);
      item.key_begin = static_cast<int32_t>(key_begin_of(s, begin));
      item.key_end = static_cast<int32_t>(key_end_of(s, end - 1));
      item.merge = -1;
      const bool may_split = args_->split_keys > 0 && rows <= kPagedTileRows && threads > 1;
      add_heads(item, may_split && (args_->cache.kv_heads > 1 || work_of(s, begin, end) > split_work_));
    }
  }

  // One item for each head, or for each head and split: those of all heads follow one another, since their keys
  // are neighbours in memory, and the processor fetches ahead from one to the next.
  void add_heads(PagedItem item, bool is_split) {
    const int64_t length = args_->split_keys, begin = item.key_begin, end = item.key_end;
    const int64_t first = is_split ? begin / length : 0, splits = is_split ? (end - 1) / length + 1 - first : 1;
    const auto first_merge = static_cast<int64_t>(merges.size());
    for (int64_t k = 0; splits > 1 && k < args_->cache.kv_heads; ++k) {
      merges.push_back({part_floats, static_cast<int32_t>(splits), static_cast<int32_t>(splits)});
      part_floats += splits * (item.row_end - item.row_begin) * (args_->cache.head_size + 2);
    }
    for (int64_t i = 0; i < splits; ++i) {
      if (splits > 1) {
        item.split = static_cast<int32_t>(i);
        item.key_begin = static_cast<int32_t>(std::max(begin, (first + i) * length));
        item.key_end = static_cast<int32_t>(std::min(end, (first + i + 1) * length));
      }
      for (int64_t k = 0; k < args_->cache.kv_heads; ++k) {
        item.kv_head = static_cast<int32_t>(k);
        if (splits > 1) item.merge = static_cast<int32_t>(first_merge + k);
        items.push_back(item);
      }
    }
  }

  const PagedAttentionArgs* args_ = nullptr;
  int64_t group_ = 1;
  int64_t tile_rows_ = kPagedTileRows;
  int64_t split_work_ = 0;
};

}  // namespace
}  // namespace ascend_vllm
