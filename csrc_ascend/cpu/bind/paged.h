// Checks of a paged cache that bindings share.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "cpu/bind/tensor.h"
#include "cpu/kernels/paged_cache.h"

namespace ascend_vllm {

inline CacheFormat cache_format_of(const at::Tensor& cache, const char* name, const at::Tensor& like) {
  if (cache.scalar_type() == like.scalar_type()) return CacheFormat::kSame;
  switch (cache.scalar_type()) {
    case at::kChar:
      return CacheFormat::kInt8;
    case at::kFloat8_e4m3fn:
      return CacheFormat::kFloat8E4m3;
    case at::kFloat8_e5m2:
      return CacheFormat::kFloat8E5m2;
    default:
      TORCH_CHECK(false, name, " must be ", like.scalar_type(), ", int8, float8_e4m3fn or float8_e5m2, got ",
                  cache.scalar_type());
  }
}

// Elements from a head of a cache to the next one: those of a block's head are contiguous, and blocks follow
// heads.
inline int64_t check_planes(const at::Tensor& planes, const char* name, int64_t width) {
  const int64_t blocks = planes.size(0), heads = planes.size(1), slots = planes.size(2);
  const int64_t stride = heads > 1 ? planes.stride(1) : planes.stride(0);
  const bool are_rows = planes.dim() == 3 || width <= 1 || planes.stride(3) == 1;
  const bool are_even = blocks <= 1 || planes.stride(0) == heads * stride;
  const bool are_dense = slots <= 1 || planes.stride(2) == width;
  TORCH_CHECK(are_rows && are_even && are_dense && stride >= slots * width, name,
              " must have contiguous rows in contiguous slots, and blocks that follow heads evenly, got shape ",
              planes.sizes(), " and strides ", planes.strides());
  return stride;
}

// Scales of the layer's cache, as the ops have them.
struct CacheScales {
  const std::optional<at::Tensor>& of_keys;
  const std::optional<at::Tensor>& of_values;
  double key, value;
};

// Checks a layer's cache of heads of `head_size` numbers; keys and values are `like`.
inline PagedCache paged_cache(const at::Tensor& key_cache, const at::Tensor& value_cache,
                              const at::Tensor& like, int64_t head_size, const CacheScales& scales) {
  for (const auto& [cache, name] :
       {std::pair{&key_cache, "key_cache"}, std::pair{&value_cache, "value_cache"}}) {
    TORCH_CHECK(cache->dim() == 4 && cache->size(3) == head_size, name,
                " must be a tensor [blocks, KV heads, block size, ", head_size, "], got shape ",
                cache->sizes());
  }
  TORCH_CHECK(value_cache.sizes() == key_cache.sizes(), "key_cache and value_cache must have one shape, got ",
              key_cache.sizes(), " and ", value_cache.sizes());
  PagedCache made{};
  made.format = cache_format_of(key_cache, "key_cache", like);
  check_same_dtype(value_cache, "value_cache", key_cache);
  made.kv_heads = key_cache.size(1);
  made.block_size = key_cache.size(2);
  made.head_size = head_size;
  made.keys = const_cast<void*>(key_cache.const_data_ptr());
  made.values = const_cast<void*>(value_cache.const_data_ptr());
  made.head_stride = check_planes(key_cache, "key_cache", head_size);
  TORCH_CHECK(check_planes(value_cache, "value_cache", head_size) == made.head_stride,
              "key_cache and value_cache must have the same strides");
  made.key_scale = static_cast<float>(scales.key);
  made.value_scale = static_cast<float>(scales.value);
  TORCH_CHECK(made.key_scale > 0 && made.value_scale > 0, "k_scale and v_scale must be positive, got ",
              scales.key, " and ", scales.value);
  const bool has_scales = scales.of_keys.has_value();
  TORCH_CHECK(has_scales == scales.of_values.has_value(), "key_scales and value_scales must be given together");
  const bool is_scaled = has_scales || made.key_scale != 1 || made.value_scale != 1;
  TORCH_CHECK(!is_scaled || made.format != CacheFormat::kSame, "a cache in ", like.scalar_type(),
              " has no scales");
  TORCH_CHECK(!has_scales || (made.key_scale == 1 && made.value_scale == 1),
              "numbers with scales of their own have no k_scale and v_scale");
  TORCH_CHECK(made.format == CacheFormat::kSame || head_size <= kMaxHeadSize,
              "a cache of bytes has heads of at most ", kMaxHeadSize, " numbers, got ", head_size);
  if (!has_scales) return made;
  for (const auto& [tensor, name] :
       {std::pair{&*scales.of_keys, "key_scales"}, std::pair{&*scales.of_values, "value_scales"}}) {
    TORCH_CHECK(tensor->scalar_type() == at::kBFloat16 && tensor->sizes() == key_cache.sizes().slice(0, 3),
                name, " must be a bfloat16 tensor [blocks, KV heads, block size], got ", tensor->scalar_type(),
                " of shape ", tensor->sizes());
  }
  made.key_scales = static_cast<bfloat16*>(const_cast<void*>(scales.of_keys->const_data_ptr()));
  made.value_scales = static_cast<bfloat16*>(const_cast<void*>(scales.of_values->const_data_ptr()));
  made.scale_head_stride = check_planes(*scales.of_keys, "key_scales", 1);
  TORCH_CHECK(check_planes(*scales.of_values, "value_scales", 1) == made.scale_head_stride,
              "key_scales and value_scales must have the same strides");
  return made;
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
