// One layer's paged cache of latents, as its kernels see it; no code of an instruction set.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace ascend_vllm {

// Maximum width of the rows of a cache of bytes.
constexpr int64_t kMaxLatentRow = 1024;

// Row s of block b starts at element b * block_stride + s * row_width of `rows`: a latent, and a rotated key
// behind it. Each of the two has a scale of its own: elements b * scale_block_stride + 2 * s and + 1 of
// `scales`.
struct LatentCache {
  CacheFormat format;
  int64_t block_size, latent_width, row_width;
  void* rows;
  int64_t block_stride;
  bfloat16* scales;  // null: numbers have no scales of their own
  int64_t scale_block_stride;
  float scale;  // of all numbers; 1 if they have scales of their own
};

}  // namespace ascend_vllm
