// Causal attention over a paged KV cache: decoding rows, prompt chunks and mixtures, as a queue of work items.
//
// paged_plan.h divides a step into items: one KV head of one sequence, a range of its query rows (token, head)
// and a range of its keys. Threads take items until none is left. For few rows, keys are divided into splits of
// kSplitKeys, whose results are merged in order. The splits depend only on the sequence, so its result is
// bitwise the same however many threads compute them.
#pragma once

#include <cstdint>

#include "cpu/dispatch.h"
#include "cpu/kernels/paged_cache.h"

namespace ascend_vllm {

struct PagedItem {
  int32_t sequence;
  int32_t kv_head;
  int32_t row_begin, row_end;  // row i: token i / group, head i % group of the KV head's group
  int32_t key_begin, key_end;
  int32_t merge;  // index of the merge that this item is a split of, or -1
  int32_t split;  // which of its splits
};

// Splits of one item, possibly computed by several threads; the last one to finish merges them.
struct PagedMerge {
  int64_t offset;  // of the first split's result in `parts`; the others follow
  int32_t splits;
  int32_t pending;
};

struct PagedAttentionArgs {
  DType dtype;
  const void* query;  // token t, head n starts at t * query_token_stride + n * query_head_stride elements
  int64_t query_token_stride, query_head_stride;
  PagedCache cache;  // its key_scale is part of `scale`
  void* out;         // [T, N, D]
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* query_start;
  const int32_t* seq_lens;
  int64_t heads;
  int block_shift;
  int64_t window;  // 0: none
  float scale;
  float soft_cap;       // of scaled scores; 0: none
  const float* slopes;  // [N], of ALiBi; null: none
  int64_t split_keys;   // 0: never split
  const PagedItem* items;
  int64_t num_items;
  PagedMerge* merges;
  float* parts;
  // one region of scratch_stride floats per thread, paged_scratch_floats() of them used
  float* scratch;
  int64_t scratch_stride;
  int threads;
};

// Maximum query rows of one item; the keys of a sequence with more rows in a step are not split.
constexpr int64_t kPagedTileRows = 128;

// Enough for every instruction set; checked where the scratch is used.
constexpr int64_t paged_scratch_floats(int64_t head_size) { return 768 * head_size + 8192; }
// More of it for a cache of bytes.
constexpr int64_t widened_scratch_floats(int64_t head_size) { return 1024 * head_size; }
// Maximum split_keys for a cache of bytes.
constexpr int64_t kMaxWidenedKeys = 512;

#ifndef ASCEND_VLLM_ISA
inline int choice_for(const PagedAttentionArgs& args) { return choice_of(args.dtype, kAttention); }
#endif

ASCEND_VLLM_KERNEL(paged_attention, PagedAttentionArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/kernels/paged_byte_lanes.h"
#include "cpu/kernels/paged_byte_tiles.h"
#include "cpu/kernels/paged_depth_lanes.h"
#include "cpu/kernels/paged_depth_pairs.h"
#include "cpu/kernels/paged_fetch.h"
#include "cpu/kernels/paged_key_lanes.h"
#include "cpu/kernels/paged_query_lanes.h"
#include "cpu/kernels/paged_query_tiles.h"
#include "cpu/kernels/paged_row_tiles.h"
#include "cpu/kernels/paged_widen.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
template <class T>
using FewRows = DepthPairs<T>;
#else
template <class T>
using FewRows = DepthLanes<T>;
#endif

// total += part, both over the same rows.
inline void merge_part(Part total, Part part, int64_t rows, int64_t size) {
  for (int64_t i = 0; i < rows; ++i) {
    const float greatest = total.max[i] > part.max[i] ? total.max[i] : part.max[i];
    const float old_factor = exp2_negative(total.max[i] - greatest);
    const float new_factor = exp2_negative(part.max[i] - greatest);
    total.max[i] = greatest;
    total.sum[i] = total.sum[i] * old_factor + part.sum[i] * new_factor;
    float* to = total.out + i * size;
    const float* from = part.out + i * size;
    for (int64_t d = 0; d < size; ++d) to[d] = to[d] * old_factor + from[d] * new_factor;
  }
}

constexpr bool fits_scratch(int64_t size) {
  const int64_t form = QueryLanes<float>::scratch_floats(size);
  return 2 * Part::floats(kPagedTileRows, size) + form <= paged_scratch_floats(size);
}
static_assert(fits_scratch(16) && fits_scratch(256));
static_assert(WidenedBlocks<float>::scratch_floats(16) <= widened_scratch_floats(16));
static_assert(kChunkKeys == kMaxWidenedKeys);

#ifdef __AVX512F__
constexpr bool key_lanes_fit_scratch(int64_t size) {
  return 2 * Part::floats(kPagedTileRows, size) + KeyLanes<int8_t>::scratch_floats(size) <=
         paged_scratch_floats(size);
}
static_assert(key_lanes_fit_scratch(32) && key_lanes_fit_scratch(256));
#endif

#ifdef __AMX_BF16__
// Minimum rows of a sequence for tiles where RowTiles does not read the cache: with QueryTiles or a cache of
// bytes, measured faster than vectors with 7 rows and slower with 1 to 4; 5 and 6 were not measured.
constexpr int64_t kMinTileRows = 6;

constexpr bool tiles_fit_scratch(int64_t size) {
  const int64_t form = max_of(QueryTiles::scratch_floats(size), RowTiles::scratch_floats(size));
  return 2 * Part::floats(kPagedTileRows, size) + form <= paged_scratch_floats(size);
}
static_assert(tiles_fit_scratch(16) && tiles_fit_scratch(40) && tiles_fit_scratch(256));
#endif

// T: of the query; Number: of the cache, T or a byte.
template <class T, class Number>
class PagedAttention {
  static constexpr bool kIsWidened = !std::is_same_v<T, Number>;

 public:
  // next: what this thread probably does next; null: not known.
  PagedAttention(const PagedAttentionArgs& args, const PagedItem& item, const PagedItem* next, float* scratch)
      : args_(args),
        item_(item),
        next_(next),
        group_(args.heads / args.cache.kv_heads),
        first_token_(args.query_start[item.sequence]),
        part_memory_(scratch),
        scratch_(scratch + 2 * Part::floats(kPagedTileRows, args.cache.head_size)) {
    const int64_t tokens = args.query_start[item.sequence + 1] - first_token_;
    sequence_rows_ = tokens * group_;
    rows_ = {item.row_begin,
             item.row_end,
             group_,
             args.seq_lens[item.sequence] - tokens,
             args.window,
             args.soft_cap * kLog2E,
             args.slopes == nullptr ? nullptr : args.slopes + item.kv_head * group_};
    blocks_ = blocks_of(item);
  }

  void run() {
    // chosen by the sequence's rows, not the item's, so that the result does not depend on the items
    const auto in_place = [](auto& form, int64_t begin, int64_t end, Part part) {
      form.attend(begin, end, part);
    };
    // queries and weights of bytes are less accurate than float32
    [[maybe_unused]] constexpr bool kTakesBytes = std::is_same_v<Number, int8_t> && !std::is_same_v<T, float>;
#ifdef __AMX_BF16__
    if constexpr (kTakesBytes) {
      if (sequence_rows_ <= kMaxDepthRows && ByteTiles::supports(args_.cache.head_size)) {
        return run_with(ByteTiles(blocks_, rows_, scale(), scratch_), in_place);
      }
    }
#elif defined(__AVX512VNNI__)
    static_assert(ByteLanes::scratch_floats(64) <= KeyLanes<int8_t>::scratch_floats(64));
    if constexpr (kTakesBytes) {
      if (ByteLanes::takes(sequence_rows_, args_.cache.head_size)) return run_fetching<ByteLanes>(in_place);
    }
#endif
#ifdef __AVX512F__
    if constexpr (std::is_same_v<T, bfloat16> && KeyLanes<Number>::kReads) {
      if (!takes_tiles() && KeyLanes<Number>::takes(sequence_rows_, args_.cache.head_size)) {
        return run_fetching<KeyLanes<Number>>(in_place);
      }
    }
#endif
    if (!takes_tiles() && sequence_rows_ <= kMaxDepthRows) {
      if constexpr (std::is_same_v<FewRows<Number>, DepthLanes<Number>>) {
        run_fetching<DepthLanes<Number>>(in_place);
      } else {
        run_with(FewRows<Number>(blocks_, rows_, scale(), scratch_), in_place);
      }
    } else if constexpr (!kIsWidened) {
      run_many_rows(blocks_, in_place);
    } else {
      WidenedBlocks<T> widened(args_.cache.head_size,
                               part_memory_ + paged_scratch_floats(args_.cache.head_size));
      run_many_rows(widened.blocks(), [&](auto& form, int64_t begin, int64_t end, Part part) {
        widened.read(blocks_, begin, end);
        // positions are those in the chunk
        const int64_t chunk = round_down(begin, kChunkKeys);
        rows_.first_position -= chunk;
        form.attend(begin - chunk, end - chunk, part);
        rows_.first_position += chunk;
      });
    }
  }

 private:
  HeadBlocks<Number> blocks_of(const PagedItem& item) const {
    const PagedCache& cache = args_.cache;
    const int64_t head_offset = item.kv_head * cache.head_stride;
    HeadBlocks<Number> blocks{static_cast<const Number*>(cache.keys) + head_offset,
                              static_cast<const Number*>(cache.values) + head_offset,
                              cache.kv_heads * cache.head_stride,
                              args_.block_table + item.sequence * args_.block_table_stride,
                              args_.block_shift,
                              cache.head_size};
    if (cache.key_scales != nullptr) {
      blocks.key_scales = cache.key_scales + item.kv_head * cache.scale_head_stride;
      blocks.value_scales = cache.value_scales + item.kv_head * cache.scale_head_stride;
      blocks.scale_stride = cache.kv_heads * cache.scale_head_stride;
    }
    return blocks;
  }

  // What this thread probably reads next, of those blocks.
  KeyRange<Number> next_keys(const HeadBlocks<Number>& blocks) const {
    if (next_ == nullptr) return {&blocks, 0, 0};
    return {&blocks, next_->key_begin, next_->key_end};
  }

  // the softmax uses powers of two, so scores are scaled by log2 e
  float scale() const { return args_.scale * kLog2E; }

  bool takes_tiles() const {
#ifdef __AMX_BF16__
    // tiles have a softmax of their own, which does not change scores
    if constexpr (std::is_same_v<T, bfloat16>) {
      const bool is_enough = sequence_rows_ >= kMinTileRows || (!kIsWidened && takes_row_tiles());
      return is_enough && scale() > 0.0f && !rows_.changes_scores();
    }
#endif
    return false;
  }

  // Form: one that prefetches what follows.
  template <class Form, class Attend>
  void run_fetching(const Attend& attend) {
    const KeyRange<Number> keys{&blocks_, item_.key_begin, item_.key_end};
    const HeadBlocks<Number> next_blocks = next_ == nullptr ? blocks_ : blocks_of(*next_);
    run_with(Form(blocks_, rows_, scale(), scratch_, typename Form::Fetch(keys, next_keys(next_blocks))),
             attend);
  }

  template <class Attend>
  void run_many_rows(const HeadBlocks<T>& blocks, const Attend& attend) {
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<T, bfloat16>) {
      if (takes_tiles()) return run_in_tiles(blocks, attend);
    }
#endif
    run_with(QueryLanes<T>(blocks, rows_, scale(), scratch_), attend);
  }

#ifdef __AMX_BF16__
  bool takes_row_tiles() const { return RowTiles::takes(sequence_rows_, args_.cache.head_size); }

  template <class Attend>
  void run_in_tiles(const HeadBlocks<bfloat16>& blocks, const Attend& attend) {
    KeyRange<bfloat16> keys{&blocks, 0, 0}, next = keys;
    const HeadBlocks<Number> next_blocks = next_ == nullptr ? blocks_ : blocks_of(*next_);
    // widened keys are in a cache
    if constexpr (!kIsWidened) {
      keys.end = item_.key_end;
      next = next_keys(next_blocks);
    }
    const TileFetch fetch(keys, next);
    if (takes_row_tiles()) {
      run_with(RowTiles(blocks, rows_, scale(), scratch_, fetch), attend);
    } else {
      run_with(QueryTiles(blocks, rows_, scale(), scratch_, fetch), attend);
    }
  }
#endif

  // attend(form, begin, end, part) computes the part of keys begin … end-1.
  template <class Form, class Attend>
  void run_with(Form form, const Attend& attend) {
    const int64_t rows = rows_.count(), size = args_.cache.head_size;
    form.load_queries([this](int64_t row) { return query(row); });
    if (item_.merge < 0) {
      const Part total = Part::at(part_memory_, rows, size);
      const Part part = Part::at(part_memory_ + Part::floats(rows, size), rows, size);
      int64_t begin = item_.key_begin, end = split_end(begin);
      attend(form, begin, end, total);
      while (end < item_.key_end) {
        begin = end;
        end = split_end(begin);
        attend(form, begin, end, part);
        merge_part(total, part, rows, size);
      }
      write(total);
      return;
    }
    PagedMerge& merge = args_.merges[item_.merge];
    const auto part_of = [&](int64_t split) {
      return Part::at(args_.parts + merge.offset + split * Part::floats(rows, size), rows, size);
    };
    attend(form, item_.key_begin, item_.key_end, part_of(item_.split));
    if (__atomic_sub_fetch(&merge.pending, 1, __ATOMIC_ACQ_REL) > 0) return;
    for (int64_t split = 1; split < merge.splits; ++split) merge_part(part_of(0), part_of(split), rows, size);
    write(part_of(0));
  }

  int64_t split_end(int64_t begin) const {
    const bool is_whole = args_.split_keys == 0 || sequence_rows_ > kPagedTileRows;
    if (is_whole && !kIsWidened) return item_.key_end;
    const int64_t length = is_whole ? kChunkKeys : args_.split_keys;
    return min_of(round_down(begin, length) + length, item_.key_end);
  }

  int64_t token_of(int64_t row) const { return first_token_ + row / group_; }
  int64_t head_of(int64_t row) const { return item_.kv_head * group_ + row % group_; }

  const T* query(int64_t row) const {
    return static_cast<const T*>(args_.query) + token_of(row) * args_.query_token_stride +
           head_of(row) * args_.query_head_stride;
  }

  void write(Part total) const {
    const int64_t size = args_.cache.head_size;
    for (int64_t i = 0; i < rows_.count(); ++i) {
      const int64_t row = rows_.begin + i;
      T* to = static_cast<T*>(args_.out) + (token_of(row) * args_.heads + head_of(row)) * size;
      const float* from = total.out + i * size;
      const VecF factor = set1(args_.cache.value_scale / total.sum[i]);
      for_lanes(
          size, [&](int64_t d) { store(to + d, load(from + d) * factor); },
          [&](int64_t d, int rest) { store_n(to + d, load_n(from + d, rest) * factor, rest); });
    }
  }

  const PagedAttentionArgs& args_;
  const PagedItem& item_;
  const PagedItem* const next_;
  const int64_t group_;
  const int64_t first_token_;
  int64_t sequence_rows_;
  float* const part_memory_;
  float* const scratch_;
  QueryRows rows_;
  HeadBlocks<Number> blocks_;
};

// Calls body(T{}, Number{}) with the types of the query and of the cache.
template <class Body>
inline void with_cache(const PagedAttentionArgs& args, const Body& body) {
  with_dtype(args.dtype, [&](auto zero) {
    switch (args.cache.format) {
      case CacheFormat::kSame:
        return body(zero, zero);
      case CacheFormat::kInt8:
        return body(zero, int8_t{});
      case CacheFormat::kFloat8E4m3:
        return body(zero, float8_e4m3{});
      case CacheFormat::kFloat8E5m2:
        return body(zero, float8_e5m2{});
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(paged_attention, PagedAttentionArgs) {
  with_cache(args, [&](auto query_zero, auto cache_zero) {
    // small items are taken several at a time, by threads that take turns
    const bool is_alone = args.threads == 1;
    const int64_t grain = is_alone ? 1 : max_of(1, args.num_items / (16 * args.threads));
    const auto run_items = [&](int64_t part, int64_t thread) {
      const int64_t begin = part * grain, end = min_of(begin + grain, args.num_items);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t next = i + 1 < end ? i + 1 : begin + args.threads * grain;
        PagedAttention<decltype(query_zero), decltype(cache_zero)>(
            args, args.items[i], next < args.num_items ? args.items + next : nullptr,
            args.scratch + thread * args.scratch_stride)
            .run();
      }
    };
    const int64_t parts = (args.num_items + grain - 1) / grain;
    if (is_alone) {
      for (int64_t i = 0; i < parts; ++i) run_items(i, 0);
    } else {
      run_parts(parts, args.threads, run_items);
    }
  });
}

}  // namespace ascend_vllm

#endif
