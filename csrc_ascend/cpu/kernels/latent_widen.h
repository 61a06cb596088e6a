// Rows of a cache of latents in one byte per number, widened to the query's dtype: kernels use each of them for
// many heads. Include after cpu/isa/math.h.
#pragma once

#include "cpu/isa/bytes.h"
#include "cpu/kernels/latent_cache.h"

namespace ascend_vllm {
namespace {

template <class Byte, class T>
inline void widen_numbers(const Byte* from, int64_t count, float scale, T* to) {
  const VecF factor = set1(scale);
  for_lanes(
      count, [&](int64_t i) { store(to + i, load(from + i) * factor); },
      [&](int64_t i, int rest) { store_n(to + i, load_n(from + i, rest) * factor, rest); });
}

template <class Byte, class T>
inline void widen_rows(const LatentCache& cache, const int32_t* table, int64_t begin, int64_t end, T* to) {
  const int64_t width = cache.latent_width, rotary = cache.row_width - width;
  for (int64_t position = begin; position < end; ++position, to += cache.row_width) {
    const int64_t block = table[position / cache.block_size], offset = position % cache.block_size;
    const Byte* row =
        static_cast<const Byte*>(cache.rows) + block * cache.block_stride + offset * cache.row_width;
    float of_latent = cache.scale, of_key = cache.scale;
    if (cache.scales != nullptr) {
      const bfloat16* scales = cache.scales + block * cache.scale_block_stride + 2 * offset;
      of_latent = to_float(scales[0]);
      of_key = to_float(scales[1]);
    }
    widen_numbers(row, width, of_latent, to);
    widen_numbers(row + width, rotary, of_key, to + width);
  }
}

// Writes positions begin … end-1 of a sequence, whose blocks are in `table`, to `to`. The cache is of bytes.
template <class T>
inline void widen_latents(const LatentCache& cache, const int32_t* table, int64_t begin, int64_t end, T* to) {
  switch (cache.format) {
    case CacheFormat::kSame:
      return;
    case CacheFormat::kInt8:
      return widen_rows<int8_t>(cache, table, begin, end, to);
    case CacheFormat::kFloat8E4m3:
      return widen_rows<float8_e4m3>(cache, table, begin, end, to);
    case CacheFormat::kFloat8E5m2:
      return widen_rows<float8_e5m2>(cache, table, begin, end, to);
  }
}

}  // namespace
}  // namespace ascend_vllm
