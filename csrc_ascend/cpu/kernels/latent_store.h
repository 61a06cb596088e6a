// What a step of latent attention writes: rotated queries, in place, and rows of the cache, whose first part is
// normalised and whose last is rotated. In a cache of bytes they are rounded after that.
#pragma once

#include "cpu/dispatch.h"
#include "cpu/kernels/latent_cache.h"

namespace ascend_vllm {

struct StoreLatentArgs {
  DType dtype;
  const int64_t* positions;  // [tokens]
  void* query;  // token t, head n starts at t * query_token_stride + n * query_head_stride elements
  int64_t query_token_stride, query_head_stride;
  const void* latent;  // [tokens, width + rotary]; row t starts at t * latent_stride
  int64_t latent_stride;
  const void* weight;    // [width]
  const float* cos_sin;  // [positions, rotary]: cosines, then sines
  LatentCache cache;
  const int64_t* slots;  // [tokens]; negative: only the queries are rotated
  int64_t tokens, heads, width, rotary;
  float epsilon;
  bool is_neox;
};

ASCEND_VLLM_KERNEL(store_latent, StoreLatentArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/kernels/paged_write.h"
#include "cpu/kernels/rms_row.h"
#include "cpu/kernels/rotary_pairs.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

// Element of the cache's rows at which a token's row begins.
inline int64_t latent_place(const LatentCache& cache, int64_t slot) {
  return slot / cache.block_size * cache.block_stride + slot % cache.block_size * cache.row_width;
}

template <class T>
inline void write_latent(const LatentCache& cache, int64_t slot, const T* row) {
  const int64_t at = latent_place(cache, slot), width = cache.latent_width;
  bfloat16* scales = nullptr;
  if (cache.scales != nullptr) {
    scales = cache.scales + slot / cache.block_size * cache.scale_block_stride + 2 * (slot % cache.block_size);
  }
  write_numbers(cache.format, row, width, cache.rows, at, scales, cache.scale);
  write_numbers(cache.format, row + width, cache.row_width - width, cache.rows, at + width,
                scales == nullptr ? nullptr : scales + 1, cache.scale);
}

template <class T>
void store_latent(const StoreLatentArgs& a) {
  const int64_t half = a.rotary / 2;
  const bool is_bytes = a.cache.format != CacheFormat::kSame;
  parallel_for(a.tokens, 2 * (a.heads + 1) * a.rotary + 2 * a.width, [&](int64_t begin, int64_t end) {
    alignas(64) T row[kMaxLatentRow];
    for (int64_t t = begin; t < end; ++t) {
      const float* cos_sin = a.cos_sin + a.positions[t] * a.rotary;
      T* query = static_cast<T*>(a.query) + t * a.query_token_stride;
      for (int64_t h = 0; h < a.heads; ++h, query += a.query_head_stride) {
        rotate_pairs(query, query, cos_sin, half, a.is_neox);
      }
      if (a.slots[t] < 0) continue;
      const T* latent = static_cast<const T*>(a.latent) + t * a.latent_stride;
      T* to = is_bytes ? row : static_cast<T*>(a.cache.rows) + latent_place(a.cache, a.slots[t]);
      const float factor = inverse_rms(sum_of_squares(latent, a.width), a.width, a.epsilon);
      scale_row(latent, to, static_cast<const T*>(a.weight), factor, a.width);
      rotate_pairs(to + a.width, latent + a.width, cos_sin, half, a.is_neox);
      if (is_bytes) write_latent(a.cache, a.slots[t], row);
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(store_latent, StoreLatentArgs) {
  with_dtype(args.dtype, [&](auto tag) { store_latent<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
