// Keys and values of one byte, widened to the query's dtype for the kernels of many rows, which use each of
// them many times: a chunk of keys at a time, into memory that stays in the L2 cache.
#pragma once

#include "cpu/kernels/paged_softmax.h"

namespace ascend_vllm {
namespace {

// log2 of the keys of a chunk; chunks begin at multiples of it, whatever the query.
constexpr int kChunkShift = 9;
constexpr int64_t kChunkKeys = int64_t{1} << kChunkShift;

// T: of the query. Numbers are multiplied by their own scales, if they have any, and rounded to T.
template <class T>
class WidenedBlocks {
 public:
  static constexpr int64_t scratch_floats(int64_t head_size) { return 2 * kChunkKeys * head_size; }

  WidenedBlocks(int64_t head_size, float* scratch)
      : keys_(reinterpret_cast<T*>(scratch)),
        values_(reinterpret_cast<T*>(scratch + kChunkKeys * head_size)),
        blocks_{keys_, values_, 0, &kFirst, kChunkShift, head_size} {}

  // One block, with the keys and values of the chunk.
  const HeadBlocks<T>& blocks() const { return blocks_; }

  // Reads positions begin … end-1, all of one chunk.
  template <class Byte>
  void read(const HeadBlocks<Byte>& from, int64_t begin, int64_t end) {
    read(from, from.keys, from.key_scales, begin, end, keys_);
    read(from, from.values, from.value_scales, begin, end, values_);
  }

 private:
  static constexpr int32_t kFirst = 0;

  template <class Byte>
  void read(const HeadBlocks<Byte>& from, const Byte* cache, const bfloat16* scales, int64_t begin, int64_t end,
            T* to) const {
    const int64_t size = from.head_size;
    float factors[kChunkKeys];
    if (scales != nullptr) from.load_scales(scales, begin, end, factors);
    from.for_runs(begin, end, [&](int64_t first, int64_t stop) {
      const Byte* numbers = cache + from.offset(first);
      T* out = to + (first & (kChunkKeys - 1)) * size;
      for (int64_t n = first; n < stop; ++n, numbers += size, out += size) {
        const VecF factor = set1(scales == nullptr ? 1.0f : factors[n - begin]);
        for_lanes(
            size, [&](int64_t d) { store(out + d, load(numbers + d) * factor); },
            [&](int64_t d, int rest) { store_n(out + d, load_n(numbers + d, rest) * factor, rest); });
      }
    });
  }

  T* const keys_;
  T* const values_;
  const HeadBlocks<T> blocks_;
};

}  // namespace
}  // namespace ascend_vllm
