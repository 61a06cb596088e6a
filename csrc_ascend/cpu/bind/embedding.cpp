#include "cpu/bind/panels.h"
#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"
#include "cpu/kernels/gather_rows.h"
#include "cpu/kernels/pack.h"

namespace ascend_vllm {
namespace {

void check_indices(const int64_t* indices, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(indices[i] >= 0 && indices[i] < rows, "indices holds ", indices[i], ", the table has ",
                      rows, " rows");
  }
}

at::Tensor gather_rows(const at::Tensor& table, const at::Tensor& indices) {
  TORCH_CHECK(table.dim() == 2 && table.is_contiguous(), "table must be a contiguous matrix, got shape ",
              table.sizes(), " and strides ", table.strides());
  dtype_of(table, "table");
  check_vector(indices, "indices", at::kLong, indices.numel());
  at::Tensor out = new_tensor({indices.numel(), table.size(1)}, table.options());
  const GatherRowsArgs args{
      .table = static_cast<const char*>(table.const_data_ptr()),
      .indices = indices.const_data_ptr<int64_t>(),
      .out = static_cast<char*>(out.mutable_data_ptr()),
      .count = indices.numel(),
      .row_bytes = table.size(1) * table.element_size(),
  };
  launch([args, rows = table.size(0)] {
    check_indices(args.indices, args.count, rows);
    gather_rows_kernel(args);
  });
  return out;
}

at::Tensor unpack_rows(const at::Tensor& packed, const at::Tensor& indices, int64_t in_features) {
  dtype_of(packed, "packed");
  TORCH_CHECK(packed.dim() > 0 && holds_panels(packed, in_features, packed.size(0)), "packed has shape ",
              packed.sizes(), ", not that of a ", packed.scalar_type(), " weight of ", in_features, " inputs");
  const int64_t count = indices.numel();
  check_vector(indices, "indices", at::kLong, count);
  at::Tensor out = new_tensor({count, in_features}, packed.options());
  const UnpackRowsArgs args{
      .packed = static_cast<const char*>(packed.const_data_ptr()),
      .indices = indices.const_data_ptr<int64_t>(),
      .out = static_cast<char*>(out.mutable_data_ptr()),
      .count = count,
      .in_features = in_features,
      .element_bytes = packed.element_size(),
      .unit_bytes = unit_bytes(packed),
  };
  launch([args, rows = 16 * packed.size(0)] {
    check_indices(args.indices, args.count, rows);
    unpack_rows_kernel(args);
  });
  return out;
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("gather_rows", &ascend_vllm::gather_rows);
  m.impl("unpack_rows", &ascend_vllm::unpack_rows);
}
