// The operators for prompts (aclnnPromptFlashAttentionV3) and for one new token (aclnnIncreFlashAttentionV4):
// the attention of Atlas inference cards (Ascend310P), which have no fused operator.
#include "sim/opapi/attention.h"

namespace ascend_sim {
namespace {

void require_counts(const AttentionCall& call, int64_t most_sequences, int64_t most_tokens) {
  require(call.batch <= most_sequences, call.query.name,
          std::to_string(call.batch) + " sequences exceed " + std::to_string(most_sequences));
  require(call.heads <= 256, call.names.heads, std::to_string(call.heads) + " exceeds 256");
  require(call.heads / call.kv_heads <= 64, call.names.kv_heads,
          "the ratio of query heads to key heads exceeds 64");
  require(call.query_dim <= 512, call.query.name,
          "head size " + std::to_string(call.query_dim) + " exceeds 512");
  require(call.kv_rows <= most_tokens && call.query_rows <= most_tokens, call.key.name,
          std::to_string(std::max(call.kv_rows, call.query_rows)) + " tokens exceed " +
              std::to_string(most_tokens));
}

// What Ascend310P adds to the rules of both operators.
void require_310p(const AttentionCall& call) {
  require(!call.pse, "pse_shift", "is not supported on Ascend310P");
  require(call.kv_heads == 0, call.names.kv_heads,
          "must be 0 on Ascend310P: keys have as many heads as the query");
}

// What it adds to those of prompts.
void require_310p_prompt(const AttentionCall& call) {
  require_310p(call);
  require(!call.query_lengths, call.names.query_lengths, "is not supported on Ascend310P");
  require(!call.kv_lengths, call.names.kv_lengths, "is not supported on Ascend310P");
  require(call.sparse_mode == 0, "sparse_mode", "must be 0 on Ascend310P");
  require(call.pre == INT32_MAX, call.names.pre, "must be 2147483647 on Ascend310P");
  require(call.next == 0 || call.next == INT32_MAX, call.names.next, "must be 0 or 2147483647 on Ascend310P");
}

// The layout TND of the prompt operator is one for latent attention's prompts.
void require_packed_prompt(const AttentionCall& call) {
  call.query.in({at::kBFloat16});
  const int64_t n = call.heads;
  require(n >= 8 && n <= 128 && (n & (n - 1)) == 0, call.names.heads,
          std::to_string(n) + " must be 8, 16, 32, 64 or 128 in TND");
  require(call.kv_heads == n, call.names.kv_heads, "must be the number of query heads in TND");
  require(call.query_dim == 192 && (call.value_dim == 128 || call.value_dim == 192), call.query.name,
          "head size " + std::to_string(call.query_dim) + " must be 192, with values of 128 or 192, in TND");
  require(call.sparse_mode == (call.mask ? 3 : 0), "sparse_mode",
          "must be 0 without a mask or 3 with one in TND");
  require(!call.pse, "pse_shift", "is not supported in TND");
}

Work prompt(AttentionCall call) {
  const bool small = soc() == Soc::P310;
  if (small) require_310p_prompt(call);
  require_layout(call, {"BSH", "BSND", "BNSD", "BNSD_BSND", "TND"});
  require(!small || call.layout != "TND", "input_layout", "TND is not supported on Ascend310P");
  require_dtypes(call, kHalfs);
  resolve(call);
  require_dense(call);
  require(call.inner_precise >= 0 && call.inner_precise <= 3, "inner_precise",
          std::to_string(call.inner_precise) + " is not supported (0 to 3)");
  require_counts(call, small ? 128 : 65536, small ? 65535 : 20971520);
  require(call.query_dim % 16 == 0, call.query.name,
          "head size " + std::to_string(call.query_dim) + " must be a multiple of 16");
  if (call.packed()) {
    require_packed_prompt(call);
  } else {
    require(call.value_dim == call.query_dim, call.value.name, "the head size is not the query's");
  }
  if (call.layout == "BSH" || call.layout == "BSND") {
    require(call.heads * call.query_dim < 65535, call.query.name,
            "heads times head size is " + std::to_string(call.heads * call.query_dim) + ", not below 65535");
  }
  require_mask(call);
  return [call = std::move(call)] { attend(call); };
}

void require_incremental_cache(const AttentionCall& call) {
  if (!call.paged()) return;
  require(call.block_size % 16 == 0 && call.block_size <= 512, "block_size",
          std::to_string(call.block_size) + " must be a multiple of 16 and at most 512");
  if (call.key.dim() == 3) {
    require(call.key.size(2) <= 65535, call.key.name,
            "heads times head size of the cache is " + std::to_string(call.key.size(2)) + ", more than 65535");
  } else {
    require(call.key.dim() == 4, call.key.name, "a fractal cache is not supported");
    require(call.layout == "BNSD", "input_layout",
            call.layout + " does not go with a cache of (blocks, heads, block size, head size)");
  }
}

Work incremental(AttentionCall call) {
  const bool small = soc() == Soc::P310;
  require_layout(call, {"BSH", "BSND", "BNSD"});
  require_dtypes(call, kHalfs);
  if (small) require_310p(call);
  resolve(call);
  require_dense(call);
  require(call.query_rows == 1, call.query.name,
          std::to_string(call.query_rows) + " query rows: the operator takes one of each sequence");
  require(call.inner_precise == 0 || call.inner_precise == 1, "inner_precise",
          std::to_string(call.inner_precise) + " is not supported (0 or 1)");
  require_counts(call, small ? 256 : 65535, small ? 65536 : 262144);
  require(call.value_dim == call.query_dim, call.value.name, "the head size is not the query's");
  require(!call.pse || call.query_dim % 16 == 0, call.query.name,
          "head size " + std::to_string(call.query_dim) + " must be a multiple of 16 with pse_shift");
  require_incremental_cache(call);
  require_mask(call);
  return [call = std::move(call)] { attend(call); };
}

}  // namespace

OPERATOR(aclnnPromptFlashAttentionV3,
         (In query, In key, In value, Maybe pse_shift, Maybe atten_mask, MaybeInts actual_seq_lengths,
          MaybeInts actual_seq_lengths_kv, Maybe deq_scale1, Maybe quant_scale1, Maybe deq_scale2,
          Maybe quant_scale2, Maybe quant_offset2, int64_t num_heads, double scale_value, int64_t pre_tokens,
          int64_t next_tokens, Text input_layout, int64_t num_key_value_heads, int64_t sparse_mode,
          int64_t inner_precise, Out attention_out),
         {
           for (const Maybe& tensor : {deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2}) {
             require_absent(tensor);
           }
           AttentionCall call;
           call.query = query;
           call.key = key;
           call.value = value;
           call.pse = pse_shift;
           call.mask = atten_mask;
           // The caller passes an absent list as an empty one.
           if (actual_seq_lengths && !actual_seq_lengths->empty()) call.query_lengths = actual_seq_lengths;
           if (actual_seq_lengths_kv && !actual_seq_lengths_kv->empty())
             call.kv_lengths = actual_seq_lengths_kv;
           call.heads = num_heads;
           call.kv_heads = num_key_value_heads;
           call.scale = scale_value;
           call.pre = pre_tokens;
           call.next = next_tokens;
           call.layout = input_layout;
           call.sparse_mode = sparse_mode;
           call.inner_precise = inner_precise;
           call.out = attention_out;
           return prompt(std::move(call));
         })

OPERATOR(aclnnIncreFlashAttentionV4,
         (In query, InList key, InList value, Maybe pse_shift, Maybe atten_mask, MaybeInts actual_seq_lengths,
          Maybe dequant_scale1, Maybe quant_scale1, Maybe dequant_scale2, Maybe quant_scale2,
          Maybe quant_offset2, Maybe antiquant_scale, Maybe antiquant_offset, Maybe block_table,
          Maybe kv_padding_size, int64_t num_heads, double scale_value, Text input_layout,
          int64_t num_key_value_heads, int64_t block_size, int64_t inner_precise, Out attention_out),
         {
           for (const Maybe& tensor : {dequant_scale1, quant_scale1, dequant_scale2, quant_scale2,
                                       quant_offset2, antiquant_scale, antiquant_offset, kv_padding_size}) {
             require_absent(tensor);
           }
           require(key.size() == 1, "key", "a list of several tensors is not simulated");
           require(value.size() == 1, "value", "a list of several tensors is not simulated");
           AttentionCall call;
           call.query = query;
           call.key = key.front();
           call.value = value.front();
           call.key.name = "key";
           call.value.name = "value";
           call.pse = pse_shift;
           call.mask = atten_mask;
           call.block_table = block_table;
           // Here the lengths are those of key and value; every query has one row.
           if (actual_seq_lengths && !actual_seq_lengths->empty()) call.kv_lengths = actual_seq_lengths;
           call.names.kv_lengths = "actual_seq_lengths";
           call.heads = num_heads;
           call.kv_heads = num_key_value_heads;
           call.scale = scale_value;
           call.pre = call.next = INT32_MAX;
           call.layout = input_layout;
           call.block_size = block_size;
           call.inner_precise = inner_precise;
           call.out = attention_out;
           return incremental(std::move(call));
         })

}  // namespace ascend_sim
