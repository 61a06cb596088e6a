// Rotary position embedding on strided query and key rows: in place, or with keys and values written to a paged
// cache.
#pragma once

#include "cpu/dispatch.h"
#include "cpu/kernels/paged_cache.h"

namespace ascend_vllm {

struct RotaryArgs {
  DType dtype;
  const int64_t* positions;  // [tokens]
  void* rows[2];             // query and key; row t starts at t * strides[i] elements
  int64_t strides[2];
  int64_t heads[2];
  const float* cos_sin;  // [positions, rot_dim]: cosines, then sines
  int64_t tokens, head_size, rot_dim;
  bool is_neox;
};

// Queries are rotated in place; keys are rotated, and values copied, into the cache.
struct RotaryStoreArgs {
  RotaryArgs rotary;  // its key rows are only read
  const void* value;  // row t starts at t * value_stride elements
  int64_t value_stride;
  PagedCache cache;
  const int64_t* slots;  // [tokens], block * S + offset; negative: skip
};

ASCEND_VLLM_KERNEL(rotary_embedding, RotaryArgs)
ASCEND_VLLM_KERNEL(rotary_store_kv, RotaryStoreArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/kernels/paged_write.h"
#include "cpu/kernels/rotary_pairs.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

// The rotated part of one head of token t. `to` may be `x`.
template <class T>
inline void rotate_head(const RotaryArgs& a, int64_t t, T* to, const T* x) {
  rotate_pairs(to, x, a.cos_sin + a.positions[t] * a.rot_dim, a.rot_dim / 2, a.is_neox);
}

// All query heads (which = 0) or key heads (1) of token t, in place.
template <class T>
inline void rotate_row(const RotaryArgs& a, int which, int64_t t) {
  T* row = static_cast<T*>(a.rows[which]) + t * a.strides[which];
  for (int64_t h = 0; h < a.heads[which]; ++h) rotate_head(a, t, row + h * a.head_size, row + h * a.head_size);
}

inline int64_t elementary_operations(const RotaryArgs& a) { return 2 * (a.heads[0] + a.heads[1]) * a.rot_dim; }

template <class T>
void rotary_embedding(const RotaryArgs& a) {
  parallel_for(a.tokens, elementary_operations(a), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      rotate_row<T>(a, 0, t);
      rotate_row<T>(a, 1, t);
    }
  });
}

template <class T>
void rotary_store_kv(const RotaryStoreArgs& args) {
  const RotaryArgs& a = args.rotary;
  const PagedCache& cache = args.cache;
  const int64_t size = a.head_size;
  parallel_for(a.tokens, elementary_operations(a), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      rotate_row<T>(a, 0, t);
      if (args.slots[t] < 0) continue;
      const T* key = static_cast<const T*>(a.rows[1]) + t * a.strides[1];
      const T* value = static_cast<const T*>(args.value) + t * args.value_stride;
      for (int64_t k = 0; k < cache.kv_heads; ++k, key += size, value += size) {
        const RowPlace place = row_place(cache, args.slots[t], k);
        T buffer[kMaxHeadSize];
        T* to = cache.format == CacheFormat::kSame ? static_cast<T*>(cache.keys) + place.numbers : buffer;
        rotate_head(a, t, to, key);
        __builtin_memcpy(to + a.rot_dim, key + a.rot_dim, (size - a.rot_dim) * sizeof(T));
        if (to == buffer) write_key(cache, place, buffer);
        write_value(cache, place, value);
      }
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(rotary_embedding, RotaryArgs) {
  with_dtype(args.dtype, [&](auto tag) { rotary_embedding<decltype(tag)>(args); });
}

ASCEND_VLLM_DEFINE_KERNEL(rotary_store_kv, RotaryStoreArgs) {
  with_dtype(args.rotary.dtype, [&](auto tag) { rotary_store_kv<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
