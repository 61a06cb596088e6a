#include "cpu/kernels/lora.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"
#include "cpu/team.h"

namespace ascend_vllm {
namespace {

// More than the matrices of any layer.
constexpr size_t kMostSlices = 8;

void check_slot(int32_t slot, int64_t slots) {
  TORCH_CHECK_INDEX(slot < slots, "adapters holds ", slot, ", there are ", slots, " slots");
}

// The rows whose adapter changes the layer, in blocks, by adapter and then in the order of the step. Valid
// until the next call.
const std::vector<LoraBlock>& blocks_of(const int32_t* adapters, const int32_t* ranks, int64_t rows,
                                        int64_t slots) {
  thread_local std::vector<std::vector<LoraBlock>> of_slots;
  thread_local std::vector<LoraBlock> blocks;
  of_slots.resize(slots);
  for (std::vector<LoraBlock>& of_slot : of_slots) of_slot.clear();
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t slot = adapters[row];
    check_slot(slot, slots);
    if (slot < 0 || ranks[slot] == 0) continue;
    std::vector<LoraBlock>& of_slot = of_slots[slot];
    if (of_slot.empty() || of_slot.back().count == kLoraRows) of_slot.push_back({slot, 0, {}});
    LoraBlock& block = of_slot.back();
    block.rows[block.count++] = static_cast<int32_t>(row);
  }
  blocks.clear();
  for (const std::vector<LoraBlock>& of_slot : of_slots) {
    blocks.insert(blocks.end(), of_slot.begin(), of_slot.end());
  }
  return blocks;
}

void check_slots(const at::Tensor& weights, const at::Tensor& adapters, const at::Tensor& ranks, int64_t rows) {
  TORCH_CHECK(weights.is_contiguous(), "weights must be contiguous, got strides ", weights.strides());
  check_vector(adapters, "adapters", at::kInt, rows);
  check_vector(ranks, "ranks", at::kInt, weights.size(0));
}

at::Tensor lora_shrink(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& adapters,
                       const at::Tensor& ranks) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, got shape ", x.sizes());
  check_rows(x, "x");
  TORCH_CHECK(weights.dim() == 5 && weights.size(3) == x.size(1) && weights.size(4) == kLoraPanel,
              "weights must be [slots, slices, panels, ", x.size(1), ", 16], got ", weights.sizes());
  check_slots(weights, adapters, ranks, x.size(0));
  at::Tensor out =
      new_tensor({x.size(0), weights.size(1), weights.size(2) * kLoraPanel}, x.options().dtype(at::kFloat));
  const at::Tensor scratch = new_tensor({team_threads() * kLoraRows * x.size(1)}, out.options());
  LoraShrinkArgs args{
      .dtype = dtype_of(x, "x"),
      .weight_dtype = dtype_of(weights, "weights"),
      .x = x.const_data_ptr(),
      .weights = weights.const_data_ptr(),
      .blocks = nullptr,
      .ranks = ranks.const_data_ptr<int32_t>(),
      .out = out.mutable_data_ptr<float>(),
      .scratch = scratch.mutable_data_ptr<float>(),
      .num_blocks = 0,
      .x_stride = x.stride(0),
      .inputs = x.size(1),
      .slices = weights.size(1),
      .panels = weights.size(2),
  };
  launch([args, rows = x.size(0), slots = weights.size(0), ids = adapters.const_data_ptr<int32_t>()]() mutable {
    const std::vector<LoraBlock>& blocks = blocks_of(ids, args.ranks, rows, slots);
    args.blocks = blocks.data();
    args.num_blocks = static_cast<int64_t>(blocks.size());
    lora_shrink_kernel(args);
  });
  return out;
}

at::Tensor lora_look_up(const at::Tensor& tables, const at::Tensor& indices, const at::Tensor& adapters,
                        const at::Tensor& ranks) {
  TORCH_CHECK(tables.dim() == 3 && tables.size(2) % kLoraPanel == 0,
              "tables must be [slots, entries, a multiple of 16], got ", tables.sizes());
  const int64_t count = indices.numel();
  check_vector(indices, "indices", at::kLong, count);
  check_slots(tables, adapters, ranks, count);
  at::Tensor out = new_tensor({count, 1, tables.size(2)}, tables.options().dtype(at::kFloat));
  const LoraLookUpArgs args{
      .dtype = dtype_of(tables, "tables"),
      .tables = tables.const_data_ptr(),
      .indices = indices.const_data_ptr<int64_t>(),
      .adapters = adapters.const_data_ptr<int32_t>(),
      .ranks = ranks.const_data_ptr<int32_t>(),
      .out = out.mutable_data_ptr<float>(),
      .rows = count,
      .entries = tables.size(1),
      .max_rank = tables.size(2),
  };
  launch([args, slots = tables.size(0)] {
    for (int64_t row = 0; row < args.rows; ++row) {
      check_slot(args.adapters[row], slots);
      TORCH_CHECK_INDEX(args.indices[row] >= 0 && args.indices[row] < args.entries, "indices holds ",
                        args.indices[row], ", the tables have ", args.entries, " entries");
    }
    lora_look_up_kernel(args);
  });
  return out;
}

at::Tensor lora_clamp_tokens(const at::Tensor& indices, int64_t size) {
  const int64_t count = indices.numel();
  check_vector(indices, "indices", at::kLong, count);
  at::Tensor out = new_tensor({count}, indices.options());
  launch([size, count, source = indices.const_data_ptr<int64_t>(), target = out.mutable_data_ptr<int64_t>()] {
    for (int64_t i = 0; i < count; ++i) target[i] = std::min(source[i], size - 1);
  });
  return out;
}

struct PutAdded {
  char* vectors;  // [count], vector_bytes each, stride_bytes apart
  const int64_t* indices;
  const int32_t* adapters;
  const char* tables;  // [slots, entries, vector_bytes]
  int64_t count, slots, entries, size, vector_bytes, stride_bytes;

  void operator()() const {
    for (int64_t row = 0; row < count; ++row) {
      const int64_t entry = indices[row] - size;
      if (entry < 0) continue;
      const int32_t slot = adapters[row];
      check_slot(slot, slots);
      TORCH_CHECK_INDEX(slot >= 0 && entry < entries, "indices holds ", indices[row], ", there are ", size,
                        " tokens and ", slot < 0 ? 0 : entries, " of the adapter");
      std::memcpy(vectors + row * stride_bytes, tables + (slot * entries + entry) * vector_bytes, vector_bytes);
    }
  }
};

void lora_put_added(const at::Tensor& vectors, const at::Tensor& indices, const at::Tensor& adapters,
                    const at::Tensor& tables, int64_t size) {
  TORCH_CHECK(vectors.dim() == 2 && tables.dim() == 3 && tables.is_contiguous() &&
                  tables.size(2) == vectors.size(1) && tables.scalar_type() == vectors.scalar_type(),
              "vectors must be [T, H] and tables a contiguous [slots, entries, H] of the same dtype, got ",
              vectors.sizes(), " and ", tables.sizes());
  check_rows(vectors, "vectors");
  check_vector(indices, "indices", at::kLong, vectors.size(0));
  check_vector(adapters, "adapters", at::kInt, vectors.size(0));
  const int64_t bytes = vectors.element_size();
  launch(PutAdded{
      .vectors = static_cast<char*>(vectors.mutable_data_ptr()),
      .indices = indices.const_data_ptr<int64_t>(),
      .adapters = adapters.const_data_ptr<int32_t>(),
      .tables = static_cast<const char*>(tables.const_data_ptr()),
      .count = vectors.size(0),
      .slots = tables.size(0),
      .entries = tables.size(1),
      .size = size,
      .vector_bytes = tables.size(2) * bytes,
      .stride_bytes = vectors.stride(0) * bytes,
  });
}

void lora_expand(const at::Tensor& y, const at::Tensor& x, const at::Tensor& weights,
                 const at::Tensor& adapters, const at::Tensor& ranks, at::IntArrayRef widths) {
  TORCH_CHECK(y.dim() == 2 && x.dim() == 3 && x.size(0) == y.size(0) && x.is_contiguous(),
              "y must be [T, N] and x a contiguous [T, slices, rank], got shapes ", y.sizes(), " and ",
              x.sizes());
  TORCH_CHECK(x.scalar_type() == at::kFloat, "x must be float32, got ", x.scalar_type());
  check_rows(y, "y");
  TORCH_CHECK(widths.size() == static_cast<size_t>(x.size(1)) && widths.size() <= kMostSlices, "there are ",
              x.size(1), " slices and ", widths.size(), " widths");
  std::array<int64_t, kMostSlices> sizes{};
  int64_t total = 0, panels = 0;
  for (size_t slice = 0; slice < widths.size(); ++slice) {
    TORCH_CHECK(widths[slice] > 0, "widths must be positive, got ", widths);
    sizes[slice] = widths[slice];
    total += widths[slice];
    panels += (widths[slice] + kLoraPanel - 1) / kLoraPanel;
  }
  TORCH_CHECK(total == y.size(1), "the widths ", widths, " do not add up to the ", y.size(1), " columns of y");
  TORCH_CHECK(weights.dim() == 4 && weights.size(1) == panels && weights.size(2) == x.size(2) &&
                  x.size(2) % kLoraPanel == 0 && weights.size(3) == kLoraPanel,
              "weights must be [slots, ", panels, ", ", x.size(2), ", 16], got ", weights.sizes());
  check_slots(weights, adapters, ranks, y.size(0));
  LoraExpandArgs args{
      .dtype = dtype_of(y, "y"),
      .weight_dtype = dtype_of(weights, "weights"),
      .x = x.const_data_ptr<float>(),
      .weights = weights.const_data_ptr(),
      .blocks = nullptr,
      .ranks = ranks.const_data_ptr<int32_t>(),
      .widths = nullptr,
      .y = y.mutable_data_ptr(),
      .num_blocks = 0,
      .y_stride = y.stride(0),
      .slices = x.size(1),
      .panels = panels,
      .max_rank = x.size(2),
  };
  launch([args, sizes, rows = y.size(0), slots = weights.size(0),
          ids = adapters.const_data_ptr<int32_t>()]() mutable {
    const std::vector<LoraBlock>& blocks = blocks_of(ids, args.ranks, rows, slots);
    args.blocks = blocks.data();
    args.num_blocks = static_cast<int64_t>(blocks.size());
    args.widths = sizes.data();
    lora_expand_kernel(args);
  });
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("lora_shrink", &ascend_vllm::lora_shrink);
  m.impl("lora_look_up", &ascend_vllm::lora_look_up);
  m.impl("lora_expand", &ascend_vllm::lora_expand);
  m.impl("lora_clamp_tokens", &ascend_vllm::lora_clamp_tokens);
  m.impl("lora_put_added", &ascend_vllm::lora_put_added);
}
