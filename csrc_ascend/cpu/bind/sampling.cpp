#include "cpu/kernels/sampling.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <tuple>

#include "cpu/bind/tape.h"
#include "cpu/bind/tensor.h"
#include "cpu/kernels/penalties.h"
#include "cpu/kernels/token_bitmask.h"
#include "cpu/kernels/token_logprobs.h"

namespace ascend_vllm {
namespace {

at::Tensor philox_uniform(const at::Tensor& seeds, const at::Tensor& positions) {
  check_vector(seeds, "seeds", at::kLong, seeds.numel());
  check_vector(positions, "positions", at::kLong, seeds.numel());
  at::Tensor out = at::empty(seeds.sizes(), seeds.options().dtype(at::kDouble));
  philox_uniform_kernel({
      .seeds = seeds.const_data_ptr<int64_t>(),
      .positions = positions.const_data_ptr<int64_t>(),
      .out = out.mutable_data_ptr<double>(),
      .size = seeds.numel(),
  });
  return out;
}

at::Tensor sample_tokens(const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_k,
                         const at::Tensor& top_p, const at::Tensor& min_p, const at::Tensor& seeds,
                         const at::Tensor& positions) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits must be [S, V] with V > 0, got ",
              logits.sizes());
  check_rows(logits, "logits");
  const int64_t rows = logits.size(0);
  check_vector(temperature, "temperature", at::kFloat, rows);
  check_vector(top_k, "top_k", at::kInt, rows);
  check_vector(top_p, "top_p", at::kFloat, rows);
  check_vector(min_p, "min_p", at::kFloat, rows);
  check_vector(seeds, "seeds", at::kLong, rows);
  check_vector(positions, "positions", at::kLong, rows);
  at::Tensor out = new_tensor({rows}, logits.options().dtype(at::kLong));
  const SampleArgs args{
      .dtype = dtype_of(logits, "logits"),
      .logits = logits.const_data_ptr(),
      .rows = rows,
      .vocab = logits.size(1),
      .stride = logits.stride(0),
      .temperature = temperature.const_data_ptr<float>(),
      .top_k = top_k.const_data_ptr<int32_t>(),
      .top_p = top_p.const_data_ptr<float>(),
      .min_p = min_p.const_data_ptr<float>(),
      .seeds = seeds.const_data_ptr<int64_t>(),
      .positions = positions.const_data_ptr<int64_t>(),
      .out = out.mutable_data_ptr<int64_t>(),
  };
  launch([args] { sample_tokens_kernel(args); });
  return out;
}

void apply_penalties(const at::Tensor& logits, const at::Tensor& token_ids, const at::Tensor& slots,
                     const at::Tensor& prompt_lens, const at::Tensor& seq_lens, const at::Tensor& repetition,
                     const at::Tensor& frequency, const at::Tensor& presence) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat, "logits must be a float32 matrix, got ",
              logits.scalar_type(), " of shape ", logits.sizes());
  check_rows(logits, "logits");
  TORCH_CHECK(token_ids.dim() == 2 && token_ids.scalar_type() == at::kInt && token_ids.is_contiguous(),
              "token_ids must be a contiguous int32 matrix");
  const int64_t rows = logits.size(0);
  check_vector(slots, "slots", at::kLong, rows);
  check_vector(prompt_lens, "prompt_lens", at::kInt, rows);
  check_vector(seq_lens, "seq_lens", at::kInt, rows);
  check_vector(repetition, "repetition", at::kFloat, rows);
  check_vector(frequency, "frequency", at::kFloat, rows);
  check_vector(presence, "presence", at::kFloat, rows);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t s = 0; s < rows; ++s) {
    TORCH_CHECK_INDEX(slot[s] >= 0 && slot[s] < token_ids.size(0), "slot ", slot[s],
                      " is outside token_ids of ", token_ids.size(0), " slots");
  }
  apply_penalties_kernel({
      .logits = logits.mutable_data_ptr<float>(),
      .rows = rows,
      .vocab = logits.size(1),
      .stride = logits.stride(0),
      .token_ids = token_ids.const_data_ptr<int32_t>(),
      .max_len = token_ids.size(1),
      .slots = slot,
      .prompt_lens = prompt_lens.const_data_ptr<int32_t>(),
      .seq_lens = seq_lens.const_data_ptr<int32_t>(),
      .repetition = repetition.const_data_ptr<float>(),
      .frequency = frequency.const_data_ptr<float>(),
      .presence = presence.const_data_ptr<float>(),
  });
}

void apply_token_bitmask(const at::Tensor& logits, const at::Tensor& bitmask, const at::Tensor& rows) {
  TORCH_CHECK(logits.dim() == 2, "logits must be a matrix, got ", logits.sizes());
  check_rows(logits, "logits");
  const int64_t words = (logits.size(1) + 31) / 32;
  TORCH_CHECK(bitmask.dim() == 2 && bitmask.scalar_type() == at::kInt && bitmask.is_contiguous() &&
                  bitmask.size(1) == words,
              "bitmask must be a contiguous int32 matrix of ", words, " columns, got ", bitmask.scalar_type(),
              " of shape ", bitmask.sizes());
  const int64_t masks = bitmask.size(0);
  check_vector(rows, "rows", at::kLong, masks);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (int64_t m = 0; m < masks; ++m) {
    TORCH_CHECK_INDEX(row[m] >= 0 && row[m] < logits.size(0), "row ", row[m], " is outside logits of ",
                      logits.size(0), " rows");
  }
  apply_token_bitmask_kernel({
      .dtype = dtype_of(logits, "logits"),
      .logits = logits.mutable_data_ptr(),
      .vocab = logits.size(1),
      .stride = logits.stride(0),
      .bitmask = bitmask.const_data_ptr<int32_t>(),
      .masks = masks,
      .words = words,
      .rows = row,
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> token_logprobs(const at::Tensor& logits,
                                                              const at::Tensor& token_ids, int64_t num_top) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits must be [A, V] with V > 0, got ",
              logits.sizes());
  TORCH_CHECK(num_top >= 0, "num_top must not be negative, got ", num_top);
  check_rows(logits, "logits");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check_vector(token_ids, "token_ids", at::kLong, rows);
  const int64_t* ids = token_ids.const_data_ptr<int64_t>();
  for (int64_t a = 0; a < rows; ++a) {
    TORCH_CHECK_INDEX(ids[a] >= 0 && ids[a] < vocab, "token ", ids[a], " is outside the vocabulary of ", vocab);
  }
  const int64_t top = std::min(num_top, vocab);
  at::Tensor out_token_ids = at::empty({rows, 1 + top}, token_ids.options());
  at::Tensor out_logprobs = at::empty({rows, 1 + top}, logits.options().dtype(at::kFloat));
  at::Tensor out_ranks = at::empty({rows}, token_ids.options());
  token_logprobs_kernel({
      .dtype = dtype_of(logits, "logits"),
      .logits = logits.const_data_ptr(),
      .rows = rows,
      .vocab = vocab,
      .stride = logits.stride(0),
      .token_ids = ids,
      .top = top,
      .out_token_ids = out_token_ids.mutable_data_ptr<int64_t>(),
      .out_logprobs = out_logprobs.mutable_data_ptr<float>(),
      .out_ranks = out_ranks.mutable_data_ptr<int64_t>(),
  });
  return {out_token_ids, out_logprobs, out_ranks};
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("philox_uniform", &ascend_vllm::philox_uniform);
  m.impl("sample_tokens", &ascend_vllm::sample_tokens);
  m.impl("apply_penalties", &ascend_vllm::apply_penalties);
  m.impl("apply_token_bitmask", &ascend_vllm::apply_token_bitmask);
  m.impl("token_logprobs", &ascend_vllm::token_logprobs);
}
