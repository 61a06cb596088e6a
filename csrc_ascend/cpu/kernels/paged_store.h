// Writes the keys and values of a step into a paged cache.
#pragma once

#include "cpu/dispatch.h"
#include "cpu/kernels/paged_cache.h"

namespace ascend_vllm {

struct StoreKvArgs {
  DType dtype;
  const void* key;    // token t, head k starts at t * key_token_stride + k * key_head_stride elements
  const void* value;  // likewise
  PagedCache cache;
  const int64_t* slots;  // [tokens], block * S + offset; negative: skip
  int64_t tokens;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
};

ASCEND_VLLM_KERNEL(store_kv, StoreKvArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/kernels/paged_write.h"
#include "cpu/parallel.h"

namespace ascend_vllm {
namespace {

template <class T>
void store_kv(const StoreKvArgs& a) {
  const PagedCache& cache = a.cache;
  const auto* keys = static_cast<const T*>(a.key);
  const auto* values = static_cast<const T*>(a.value);
  // a copy moves about sixteen bytes in the time of an elementary operation
  const int64_t operations =
      cache.format == CacheFormat::kSame ? sizeof(T) * cache.head_size / 16 : cache.head_size;
  parallel_for(a.tokens, 2 * cache.kv_heads * operations, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (a.slots[t] < 0) continue;
      for (int64_t k = 0; k < cache.kv_heads; ++k) {
        const RowPlace place = row_place(cache, a.slots[t], k);
        write_key(cache, place, keys + t * a.key_token_stride + k * a.key_head_stride);
        write_value(cache, place, values + t * a.value_token_stride + k * a.value_head_stride);
      }
    }
  });
}

}  // namespace

ASCEND_VLLM_DEFINE_KERNEL(store_kv, StoreKvArgs) {
  with_dtype(args.dtype, [&](auto tag) { store_kv<decltype(tag)>(args); });
}

}  // namespace ascend_vllm

#endif
