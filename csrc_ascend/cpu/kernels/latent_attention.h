// Causal attention of absorbed queries to a paged cache of latents: decoding rows and short prompt chunks.
//
// latent_plan.h divides a step into items: a range of a sequence's query rows (token, head) and a range of its
// keys. Keys are divided into splits of kLatentSplitKeys, whose results are merged in order, by one thread or
// by several; so a sequence's result is bitwise the same however many threads compute it.
#pragma once

#include <cstdint>

#include "cpu/dispatch.h"
#include "cpu/kernels/latent_cache.h"

namespace ascend_vllm {

struct LatentItem {
  int32_t sequence;
  int32_t row_begin, row_end;  // row i: token i / heads, head i % heads
  int32_t key_begin, key_end;
  int32_t merge;  // index of the merge that this item is a split of, or -1
};

// Splits of one item, possibly computed by several threads; the last one to finish merges them.
struct LatentMerge {
  int64_t offset;  // of the first split's result in `parts`; the others follow
  int32_t splits;
  int32_t pending;
};

struct LatentAttentionArgs {
  DType dtype;
  const void* query;  // token t, head n starts at t * query_token_stride + n * query_head_stride elements
  int64_t query_token_stride, query_head_stride;
  LatentCache cache;
  void* out;  // [tokens, heads, value_width]
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* query_start;
  const int32_t* seq_lens;
  int64_t heads, width, value_width;
  int block_shift;
  float scale;
  const LatentItem* items;
  int64_t num_items;
  LatentMerge* merges;
  float* parts;
  // one region of scratch_stride floats per thread, latent_scratch_floats() of them used
  float* scratch;
  int64_t scratch_stride;
  int threads;
};

// Maximum query rows of one item.
constexpr int64_t kLatentItemRows = 128;
// Keys of a split: long enough that merging costs nothing, short enough that one long sequence feeds many
// cores.
constexpr int64_t kLatentSplitKeys = 512;

// Floats of the sums of one split, and of the scratch of an item; enough for every instruction set, checked
// where they are used.
constexpr int64_t latent_part_floats(int64_t rows, int64_t value_width) {
  return (rows + 15) / 16 * 16 * ((value_width + 31) / 32 * 32 + 2);
}
constexpr int64_t latent_scratch_floats(int64_t width, int64_t value_width) {
  return 224 * width + 16384 + 2 * latent_part_floats(kLatentItemRows, value_width);
}
// Further scratch of an item, with a cache of bytes: its rows are widened a split at a time, which stays in the
// L2 cache.
constexpr int64_t latent_widened_floats(int64_t width) { return kLatentSplitKeys * width; }

#ifndef ASCEND_VLLM_ISA
inline int choice_for(const LatentAttentionArgs& args) { return choice_of(args.dtype, kAttention); }
#endif

ASCEND_VLLM_KERNEL(latent_attention, LatentAttentionArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/kernels/latent_lanes.h"
#ifdef __AMX_BF16__
#include "cpu/kernels/latent_tiles.h"
#endif
#include "cpu/kernels/latent_widen.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

template <class T>
constexpr bool fits_scratch(int64_t width) {
  return LatentFormOf<T>::type::scratch_floats(width) <=
         latent_scratch_floats(width, 0) - 2 * 2 * kLatentItemRows;
}
static_assert(fits_scratch<float>(8) && fits_scratch<float>(4096));
static_assert(fits_scratch<bfloat16>(8) && fits_scratch<bfloat16>(4096));
static_assert(LatentFormOf<float>::type::kMostRows == kLatentItemRows);
static_assert(LatentFormOf<bfloat16>::type::kMostRows == kLatentItemRows);
static_assert(LanesPart::floats(100, 24) == latent_part_floats(100, 24));

template <class T>
void attend_item(const LatentAttentionArgs& a, const LatentItem& item, float* scratch) {
  const int64_t first_token = a.query_start[item.sequence];
  const int64_t tokens = a.query_start[item.sequence + 1] - first_token;
  const QueryRows rows{item.row_begin, item.row_end, a.heads, a.seq_lens[item.sequence] - tokens, 0,
                       0.0f,           nullptr};
  const int32_t* table = a.block_table + item.sequence * a.block_table_stride;
  const bool is_bytes = a.cache.format != CacheFormat::kSame;
  T* widened = reinterpret_cast<T*>(scratch + latent_scratch_floats(a.width, a.value_width));
  const T* cache = is_bytes ? widened : static_cast<const T*>(a.cache.rows);
  AttendedRows<T> attended{cache,        cache, a.width, a.width, a.value_width, is_bytes ? nullptr : table,
                           a.block_shift};
  const int64_t part_floats = latent_part_floats(rows.count(), a.value_width);
  // the softmax uses powers of two, so scores are scaled by log2 e
  typename LatentFormOf<T>::type form(attended, rows, a.scale * kLog2E, scratch + 2 * part_floats);
  form.load_queries([&](int64_t row) {
    return static_cast<const T*>(a.query) + (first_token + row / a.heads) * a.query_token_stride +
           row % a.heads * a.query_head_stride;
  });
  const auto part_at = [&](float* memory, int64_t index) {
    return LanesPart::at(memory + index * part_floats, rows.count(), a.value_width);
  };
  const auto attend = [&](int64_t begin, int64_t end, LanesPart part) {
    if (is_bytes) {
      widen_latents(a.cache, table, begin, end, widened);
      attended.first = begin;
    }
    form.attend(begin, end, part);
  };
  const auto write = [&](LanesPart total) {
    T* out = static_cast<T*>(a.out) + first_token * a.heads * a.value_width;
    form.write(total, [&](int64_t row) { return out + row * a.value_width; });
  };
  if constexpr (std::is_same_v<typename LatentFormOf<T>::type, LatentLanes<T>>) {
    const bool is_alone = a.num_items == 1 && a.threads > 1 && item.key_begin == 0 && !is_bytes;
    if (is_alone && form.can_attend_together(item.key_end)) {
      form.attend_together(item.key_end, part_at(scratch, 0), [&](int64_t parts, const auto& part) {
        run_parts(parts, a.threads, [&](int64_t index, int64_t thread) {
          part(index, LatentLanes<T>::values_of(a.scratch + thread * a.scratch_stride + 2 * part_floats));
        });
      });
      return write(part_at(scratch, 0));
    }
  }
  if (item.merge < 0) {
    for (int64_t begin = item.key_begin; begin < item.key_end; begin += kLatentSplitKeys) {
      const int64_t end = min_of(begin + kLatentSplitKeys, item.key_end);
      attend(begin, end, part_at(scratch, begin == item.key_begin ? 0 : 1));
      if (begin > item.key_begin) form.merge(part_at(scratch, 0), part_at(scratch, 1));
    }
    return write(part_at(scratch, 0));
  }
  LatentMerge& merge = a.merges[item.merge];
  float* parts = a.parts + merge.offset;
  attend(item.key_begin, item.key_end, part_at(parts, item.key_begin / kLatentSplitKeys));
  if (__atomic_sub_fetch(&merge.pending, 1, __ATOMIC_ACQ_REL) > 0) return;
  for (int64_t split = 1; split < merge.splits; ++split) form.merge(part_at(parts, 0), part_at(parts, split));
  write(part_at(parts, 0));
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(latent_attention, LatentAttentionArgs) {
  with_dtype(args.dtype, [&](auto tag) {
    const auto run = [&](int64_t i, int64_t thread) {
      attend_item<decltype(tag)>(args, args.items[i], args.scratch + thread * args.scratch_stride);
    };
    // a single item may have jobs of its own
    if (args.threads == 1 || args.num_items == 1) {
      for (int64_t i = 0; i < args.num_items; ++i) run(i, 0);
    } else {
      run_parts(args.num_items, args.threads, run);
    }
  });
}

}  // namespace ascend_vllm

#endif
