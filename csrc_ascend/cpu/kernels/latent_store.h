// What a step of latent attention writes: rotated queries, in place, and rows of the cache, whose first part is
// normalised and whose last is rotated.
#pragma once

#include "cpu/dispatch.h"

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
  void* cache;           // [slots, width + rotary]
  const int64_t* slots;  // [tokens]; negative: only the queries are rotated
  int64_t tokens, heads, width, rotary;
  float epsilon;
  bool is_neox;
};

ASCEND_VLLM_KERNEL(store_latent, StoreLatentArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/kernels/rms_row.h"
#include "cpu/kernels/rotary_pairs.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

template <class T>
void store_latent(const StoreLatentArgs& a) {
  const int64_t half = a.rotary / 2;
  parallel_for(a.tokens, 2 * (a.heads + 1) * a.rotary + 2 * a.width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos_sin = a.cos_sin + a.positions[t] * a.rotary;
      T* query = static_cast<T*>(a.query) + t * a.query_token_stride;
      for (int64_t h = 0; h < a.heads; ++h, query += a.query_head_stride) {
        rotate_pairs(query, query, cos_sin, half, a.is_neox);
      }
      if (a.slots[t] < 0) continue;
      const T* latent = static_cast<const T*>(a.latent) + t * a.latent_stride;
      T* to = static_cast<T*>(a.cache) + a.slots[t] * (a.width + a.rotary);
      const float factor = inverse_rms(sum_of_squares(latent, a.width), a.width, a.epsilon);
      scale_row(latent, to, static_cast<const T*>(a.weight), factor, a.width);
      rotate_pairs(to + a.width, latent + a.width, cos_sin, half, a.is_neox);
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(store_latent, StoreLatentArgs) {
  with_dtype(args.dtype, [&](auto tag) { store_latent<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
