// Divides a step of latent attention into work items; included by the binding only, so it is compiled once.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/kernels/latent_attention.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

// Reuses its memory from step to step.
class LatentPlan {
 public:
  std::vector<LatentItem> items;
  std::vector<LatentMerge> merges;
  int64_t part_floats = 0;
  int threads = 1;

  // Reads the shapes of `args`, query_start and seq_lens. wanted_threads: 0 to choose by the amount of work.
  void make(const LatentAttentionArgs& args, int64_t num_sequences, int wanted_threads) {
    items.clear();
    merges.clear();
    part_floats = 0;
    int64_t work = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
      const int64_t tokens = args.query_start[s + 1] - args.query_start[s], rows = tokens * args.heads;
      if (tokens == 0) continue;
      const int64_t blocks = (rows + kLatentItemRows - 1) / kLatentItemRows;
      for (int64_t b = blocks - 1; b >= 0; --b) {
        LatentItem item{};
        item.sequence = static_cast<int32_t>(s);
        item.row_begin = static_cast<int32_t>(rows * b / blocks);
        item.row_end = static_cast<int32_t>(rows * (b + 1) / blocks);
        item.key_end = static_cast<int32_t>(args.seq_lens[s] - tokens + (item.row_end - 1) / args.heads + 1);
        item.merge = -1;
        work += work_of(args, item);
        items.push_back(item);
      }
    }
    threads = wanted_threads > 0 ? wanted_threads : threads_for(work);
    if (threads > 1) split(args, work / (4 * threads));
  }

 private:
  // In vectors of eight multiplications.
  static int64_t work_of(const LatentAttentionArgs& args, const LatentItem& item) {
    return int64_t{item.row_end - item.row_begin} * item.key_end * (args.width + args.value_width) / 8;
  }

  // Divides the keys of items with more than `most_work`, which are a large part of a thread's.
  void split(const LatentAttentionArgs& args, int64_t most_work) {
    const size_t count = items.size();
    for (size_t i = 0; i < count; ++i) {
      LatentItem item = items[i];
      const int64_t splits = (item.key_end + kLatentSplitKeys - 1) / kLatentSplitKeys, end = item.key_end;
      if (splits == 1 || work_of(args, item) <= most_work) continue;
      item.merge = static_cast<int32_t>(merges.size());
      merges.push_back({part_floats, static_cast<int32_t>(splits), static_cast<int32_t>(splits)});
      part_floats += splits * latent_part_floats(item.row_end - item.row_begin, args.value_width);
      for (int64_t k = 0; k < splits; ++k) {
        item.key_begin = static_cast<int32_t>(k * kLatentSplitKeys);
        item.key_end = static_cast<int32_t>(std::min(end, (k + 1) * kLatentSplitKeys));
        if (k == 0) {
          items[i] = item;
        } else {
          items.push_back(item);
        }
      }
    }
  }
};

}  // namespace
}  // namespace ascend_vllm
