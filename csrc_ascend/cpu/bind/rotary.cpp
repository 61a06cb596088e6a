#include "cpu/kernels/rotary.h"

#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"

namespace ascend_vllm {
namespace {

void check_heads(const at::Tensor& rows, const char* name, const at::Tensor& positions, int64_t head_size) {
  TORCH_CHECK(rows.dim() == 2 && rows.size(0) == positions.size(0) && rows.size(1) % head_size == 0, name,
              " must be [", positions.size(0), ", a multiple of ", head_size, "], got ", rows.sizes());
  check_rows(rows, name);
}

void rotary_embedding(const at::Tensor& positions, const at::Tensor& query, const at::Tensor& key,
                      int64_t head_size, const at::Tensor& cos_sin_cache, bool is_neox) {
  TORCH_CHECK(head_size > 0, "head_size must be positive, got ", head_size);
  check_vector(positions, "positions", at::kLong, positions.numel());
  check_heads(query, "query", positions, head_size);
  check_heads(key, "key", positions, head_size);
  check_same_dtype(key, "key", query);
  TORCH_CHECK(cos_sin_cache.dim() == 2 && cos_sin_cache.scalar_type() == at::kFloat &&
                  cos_sin_cache.is_contiguous() && cos_sin_cache.size(1) % 2 == 0 &&
                  cos_sin_cache.size(1) <= head_size,
              "cos_sin_cache must be a contiguous float32 matrix with an even number of columns, at most ",
              head_size, ", got ", cos_sin_cache.scalar_type(), " of shape ", cos_sin_cache.sizes());
  const RotaryArgs args{
      .dtype = dtype_of(query, "query"),
      .positions = positions.const_data_ptr<int64_t>(),
      .rows = {query.mutable_data_ptr(), key.mutable_data_ptr()},
      .strides = {query.stride(0), key.stride(0)},
      .heads = {query.size(1) / head_size, key.size(1) / head_size},
      .cos_sin = cos_sin_cache.const_data_ptr<float>(),
      .tokens = positions.size(0),
      .head_size = head_size,
      .rot_dim = cos_sin_cache.size(1),
      .is_neox = is_neox,
  };
  launch([args, num_positions = cos_sin_cache.size(0)] {
    for (int64_t t = 0; t < args.tokens; ++t) {
      const int64_t position = args.positions[t];
      TORCH_CHECK_INDEX(position >= 0 && position < num_positions, "position ", position,
                        " is outside the rotary table of ", num_positions, " positions");
    }
    rotary_embedding_kernel(args);
  });
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) { m.impl("rotary_embedding", &ascend_vllm::rotary_embedding); }
