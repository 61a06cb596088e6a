// Copies rows of a table, such as embeddings; the dtype does not matter, so sizes are in bytes.
#pragma once

#include "cpu/dispatch.h"

namespace ascend_vllm {

struct GatherRowsArgs {
  const char* table;       // row n starts at n * row_bytes
  const int64_t* indices;  // [count], of rows
  char* out;               // [count, row_bytes]
  int64_t count, row_bytes;
};

ASCEND_VLLM_KERNEL(gather_rows, GatherRowsArgs)

}  // namespace ascend_vllm

#ifdef ASCEND_VLLM_ISA

#include "cpu/parallel.h"

namespace ascend_vllm {

ASCEND_VLLM_DEFINE_KERNEL(gather_rows, GatherRowsArgs) {
  const GatherRowsArgs a = args;
  // a copy moves about sixteen bytes in the time of an elementary operation
  parallel_for(a.count, a.row_bytes / 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      __builtin_memcpy(a.out + i * a.row_bytes, a.table + a.indices[i] * a.row_bytes, a.row_bytes);
    }
  });
}

}  // namespace ascend_vllm

#endif
