// Checks of a paged cache that bindings share.
#pragma once

#include <algorithm>

#include "cpu/bind/tensor.h"

namespace ascend_vllm {

// Checks the cache of keys or values, [P, K, S, D].
inline void check_cache(const at::Tensor& cache, const char* name, const at::Tensor& like, int64_t head_size) {
  check_same_dtype(cache, name, like);
  TORCH_CHECK(cache.dim() == 4 && cache.size(3) == head_size && cache.is_contiguous(), name,
              " must be a contiguous tensor [blocks, KV heads, block size, ", head_size, "], got shape ",
              cache.sizes(), " and strides ", cache.strides());
}

// Checks both halves of a layer's cache, for `kv_heads` heads.
inline void check_caches(const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& like,
                         int64_t kv_heads, int64_t head_size) {
  check_cache(key_cache, "key_cache", like, head_size);
  check_cache(value_cache, "value_cache", like, head_size);
  TORCH_CHECK(key_cache.size(1) == kv_heads && value_cache.sizes() == key_cache.sizes(),
              "key_cache and value_cache must have one shape with ", kv_heads, " KV heads, got ",
              key_cache.sizes(), " and ", value_cache.sizes());
}

// Kernels do not check slots, which are data, so this is done on every call and replay.
inline void check_slots(const int64_t* slots, int64_t tokens, int64_t num_slots) {
  int64_t greatest = -1;
  for (int64_t t = 0; t < tokens; ++t) greatest = std::max(greatest, slots[t]);
  TORCH_CHECK_INDEX(greatest < num_slots, "slot_mapping holds slot ", greatest, ", the cache has ", num_slots);
}

// Kernels do not check positions either.
inline void check_positions(const int64_t* positions, int64_t tokens, int64_t num_positions) {
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK_INDEX(positions[t] >= 0 && positions[t] < num_positions, "position ", positions[t],
                      " is outside the rotary table of ", num_positions, " positions");
  }
}

inline int log2_of_block_size(int64_t block_size) {
  for (int shift = 4; shift <= 7; ++shift) {
    if (block_size == int64_t{1} << shift) return shift;
  }
  TORCH_CHECK(false, "block size must be 16, 32, 64 or 128, got ", block_size);
}

// The rows of a step of attention, as addresses, which are read when it runs.
struct PagedSequences {
  const int32_t* block_table;
  int64_t block_table_stride, table_width;
  const int32_t *query_start, *seq_lens;
  int64_t count, tokens;
  int64_t blocks;  // of the cache
  int block_shift;
  int64_t window;  // 0: none

  // Kernels do not check lengths and blocks, which are data, so this is done on every call and replay.
  void check() const {
    TORCH_CHECK_INDEX(query_start[0] >= 0 && query_start[count] <= tokens, "query_start runs from ",
                      query_start[0], " to ", query_start[count], ", query has ", tokens, " tokens");
    for (int64_t s = 0; s < count; ++s) {
      const int64_t of_row = query_start[s + 1] - query_start[s];
      TORCH_CHECK_INDEX(of_row >= 0, "query_start descends after row ", s);
      if (of_row == 0) continue;
      TORCH_CHECK_INDEX(seq_lens[s] >= of_row, "row ", s, " has ", of_row, " query tokens and a length of ",
                        seq_lens[s]);
      const int64_t last = (seq_lens[s] - 1) >> block_shift;
      TORCH_CHECK_INDEX(last < table_width, "row ", s, " of length ", seq_lens[s], " needs ", last + 1,
                        " blocks, block_table has ", table_width);
      const int64_t oldest = window > 0 ? std::max<int64_t>(0, seq_lens[s] - of_row - window + 1) : 0;
      const int32_t* table = block_table + s * block_table_stride;
      uint32_t greatest = 0;  // unsigned, so that negative ids are too large
      for (int64_t b = oldest >> block_shift; b <= last; ++b) {
        greatest = std::max(greatest, static_cast<uint32_t>(table[b]));
      }
      TORCH_CHECK_INDEX(greatest < static_cast<uint64_t>(blocks), "block_table of row ", s, " holds block ",
                        static_cast<int32_t>(greatest), ", the cache has ", blocks);
    }
  }
};

inline PagedSequences paged_sequences(const at::Tensor& block_table, const at::Tensor& query_start,
                                      const at::Tensor& seq_lens, int64_t tokens, int64_t blocks,
                                      int64_t block_size, int64_t window) {
  const int64_t count = seq_lens.numel();
  check_vector(seq_lens, "seq_lens", at::kInt, count);
  check_vector(query_start, "query_start", at::kInt, count + 1);
  TORCH_CHECK(block_table.scalar_type() == at::kInt && block_table.dim() == 2 && block_table.size(0) == count,
              "block_table must be an int32 matrix of ", count, " rows, got ", block_table.scalar_type(),
              " of shape ", block_table.sizes());
  check_rows(block_table, "block_table");
  return {
      .block_table = block_table.const_data_ptr<int32_t>(),
      .block_table_stride = block_table.stride(0),
      .table_width = block_table.size(1),
      .query_start = query_start.const_data_ptr<int32_t>(),
      .seq_lens = seq_lens.const_data_ptr<int32_t>(),
      .count = count,
      .tokens = tokens,
      .blocks = blocks,
      .block_shift = log2_of_block_size(block_size),
      .window = window,
  };
}

}  // namespace ascend_vllm
