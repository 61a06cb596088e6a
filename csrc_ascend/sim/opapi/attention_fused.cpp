// npu_fused_infer_attention_score (aclnnFusedInferAttentionScoreV3) and its second form (V4, V5).
#include <set>

#include "sim/opapi/attention.h"

namespace ascend_sim {
namespace {

bool one_of(const std::string& name, const std::set<std::string>& names) { return names.count(name) > 0; }

// Without ropes and outside the packed layouts, a single query row has no causal mask: the operator's decode
// branch takes mask, pre_tokens and next_tokens as if there were none of the modes.
bool decodes(const AttentionCall& call) {
  return !call.packed() && call.query_rows == 1 && !call.has_rope() && call.query_dim == call.value_dim;
}

// What the kernel for ragged rows takes, which alone has packed heads of other sizes than 64 and 128, and 192
// with values of 128: up to 256, in TND. Source: host tiling of CANN's ops-transformer.
struct RaggedKernel {
  int64_t block_multiple, block_most;
  // the band of sparse_mode 4
  bool windows;
  // as many key heads as query heads with high precision, and over a block table
  bool single_heads;
};
RaggedKernel ragged_kernel() {
  return cann() >= 900 ? RaggedKernel{16, 512, true, true} : RaggedKernel{128, 128, false, false};
}

void require_block_size(const AttentionCall& call) {
  if (!call.paged()) return;
  const int64_t size = call.block_size;
  const auto rule = [&](int64_t multiple, int64_t most) {
    require(size % multiple == 0 && size <= most, "block_size",
            std::to_string(size) + " must be a multiple of " + std::to_string(multiple) + " and at most " +
                std::to_string(most) + " (layout " + call.layout + ", head size " +
                std::to_string(call.query_dim) + ")");
  };
  const bool common = call.has_rope() || call.query_dim == 64 || call.query_dim == 128;
  if (common) {
    rule(16, 1024);
  } else if (call.packed()) {
    rule(ragged_kernel().block_multiple, ragged_kernel().block_most);
  } else if (call.query_rows > 1) {
    rule(128, 1024);
  } else {
    rule(16, 512);
  }
  if (call.key.dim() == 3) {
    require(call.key.size(2) <= 65535, call.key.name,
            "heads times head size of the cache is " + std::to_string(call.key.size(2)) + ", more than 65535");
  }
  const int64_t elements = call.key.numel();
  require(!decodes(call) || elements <= INT32_MAX, call.key.name,
          std::to_string(elements) + " elements are beyond the range of int32");
}

// Head sizes of the packed layouts: 64 and 128, 192 with values of 128, and those of the ragged kernel.
void require_packed_dims(const AttentionCall& call) {
  const int64_t d = call.query_dim, v = call.value_dim;
  if (d == v && (d == 64 || d == 128)) return;
  if (d == 192 && v == 128) return;
  require(call.layout == "TND", call.query.name,
          "head size " + std::to_string(d) + " must be 64 or 128 in the layout " + call.layout);
  require(d == v, call.value.name,
          "head size " + std::to_string(v) + " is not the query's " + std::to_string(d) +
              ", which only values of 128 to queries of 192 may");
  require(d <= 256, call.query.name, "head size " + std::to_string(d) + " exceeds 256 in TND");
  const bool half_of_many = call.query.scalar_type() == at::kHalf && call.heads == call.kv_heads;
  require(call.inner_precise == 0 || (call.inner_precise == 1 && half_of_many), "inner_precise",
          std::to_string(call.inner_precise) + " is not supported for the head size " + std::to_string(d) +
              " (only 64, 128 and 192 with values of 128 have a high-performance kernel)");
  const RaggedKernel kernel = ragged_kernel();
  require(kernel.windows || call.sparse_mode != 4, "sparse_mode",
          "4 is not supported for the head size " + std::to_string(d) + " before CANN 9.0");
  require(kernel.single_heads || call.heads != call.kv_heads ||
              (half_of_many && call.inner_precise == 1 && !call.mask && !call.paged()),
          call.names.kv_heads,
          "as many as query heads, of size " + std::to_string(d) +
              ", need float16, inner_precise 1, no mask and no block table before CANN 9.0");
}

void require_dims(const AttentionCall& call) {
  const int64_t d = call.query_dim, v = call.value_dim;
  require(d <= 512 && v <= 512, call.query.name,
          "head size " + std::to_string(std::max(d, v)) + " exceeds 512");
  require(decodes(call) || d % 16 == 0, call.query.name,
          "head size " + std::to_string(d) + " must be a multiple of 16");
  require(call.batch <= 65536, call.query.name, std::to_string(call.batch) + " sequences exceed 65536");
  require(call.heads <= 256, call.names.heads, std::to_string(call.heads) + " exceeds 256");
  require(call.heads / call.kv_heads <= 64, call.names.kv_heads,
          "the ratio of query heads to key heads exceeds 64");
  if (call.layout == "BSH" || call.layout == "BSND") {
    require(call.heads * d < 65535 || call.has_rope(), call.query.name,
            "heads times head size is " + std::to_string(call.heads * d) + ", not below 65535");
  }
  if (call.packed()) {
    require_packed_dims(call);
    return;
  }
  require(d == v || (d == 192 && v == 128), call.value.name,
          "head size " + std::to_string(v) + " differs from the query's " + std::to_string(d) +
              ", which only 128 to 192 may");
  if (one_of(call.layout, {"BSH_BNSD", "BSND_BNSD"})) {
    require(v == 64 || v == 128, call.value.name,
            "head size " + std::to_string(v) + " must be 64 or 128 in the layout " + call.layout);
  }
  if (call.key.dim() == 5) {
    require(d == 64 || d == 128, call.key.name,
            "head size " + std::to_string(d) + " of a fractal cache must be 64 or 128");
  }
}

// Multi-head latent attention: a compressed head of 512 with a cache of one head, or heads of 128 with a rope
// part.
void require_latent(const AttentionCall& call) {
  const int64_t d = call.query_dim;
  require(d == call.value_dim && (d == 512 || d == 128), call.query.name,
          "head size " + std::to_string(d) + " with query_rope must be 512 or 128");
  if (d == 128) {
    require_layout(call,
                   {"BSH", "BSND", "BNSD", "BNSD_BSND", "TND", "NTD", "BSH_BNSD", "BSND_BNSD", "NTD_TND"});
    return;
  }
  require_layout(call, {"BSH", "BSND", "BNSD", "TND", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND_NTD"});
  require(call.paged(), "block_table", "must be given for the head size 512");
  require(call.kv_heads == 1, call.names.kv_heads, "must be 1 for the head size 512");
  const int64_t n = call.heads;
  require(n <= 128 && (n & (n - 1)) == 0, call.names.heads,
          std::to_string(n) + " must be a power of two up to 128 for the head size 512");
  require(call.query_rows <= 16, call.names.query_lengths,
          "a sequence has " + std::to_string(call.query_rows) + " query rows, more than 16");
  const bool many = call.query_rows > 1;
  require(call.sparse_mode == 4 || call.sparse_mode == (many ? 3 : 0), "sparse_mode",
          std::to_string(call.sparse_mode) + " must be " + (many ? "3" : "0") + " or 4 for " +
              std::to_string(call.query_rows) + " query rows");
  require(call.sparse_mode != 0 || !call.mask, "atten_mask", "must not be given for one query row");
  require(!call.packed() || !call.wants_lse, call.names.lse, "is not supported for the head size 512 in TND");
  if (call.key.dim() == 5) {
    require(call.layout.rfind("BNSD", 0) != 0, "input_layout",
            "a fractal cache does not go with " + call.layout);
    require(call.block_size != 16, "block_size", "16 is not supported with a fractal cache");
  }
}

void require_plain(const AttentionCall& call) {
  require_layout(call, {"BSH", "BSND", "BNSD", "BNSD_BSND", "TND", "NTD", "BSH_BNSD", "BSND_BNSD", "NTD_TND"});
  require(call.layout != "BNSD_BSND" || call.query_rows > 1, "input_layout",
          "BNSD_BSND needs more than one query row");
  require_dims(call);
}

void require_fused_mask(AttentionCall& call) {
  if (decodes(call)) {
    call.sparse_mode = 0;
    call.pre = call.next = INT32_MAX;
  }
  if (call.packed()) {
    require(call.sparse_mode != 1 && call.sparse_mode != 2, "sparse_mode",
            std::to_string(call.sparse_mode) + " is not supported in " + call.layout + " (0, 3 or 4)");
    require(call.sparse_mode != 0 || !call.mask, "atten_mask",
            "must not be given in " + call.layout + " with sparse_mode 0");
  }
  require_mask(call);
  if (call.mask && call.sparse_mode < 2 && call.mask->dim() == 2) {
    require(!call.has_rope() && call.query_dim == call.value_dim &&
                one_of(call.layout, {"BSH", "BSND", "BNSD", "BNSD_BSND"}),
            "atten_mask", "a mask of two axes is not supported here");
  }
}

// What CANN's kernel library reserves for the cores that work together. Partial results of sequences that are
// divided among cores come on top on a chip.
constexpr int64_t kLibraryWorkspace = 16 << 20;

// What the operator takes on Atlas A2 and A3; the others do not have it.
Work fused(AttentionCall call) {
  require(soc() != Soc::P310, "query", "the operator does not exist on Ascend310P");
  require_dtypes(call, kHalfs);
  resolve(call);
  require(call.inner_precise >= 0 && call.inner_precise <= 3, "inner_precise",
          std::to_string(call.inner_precise) + " is not supported (0 to 3)");
  require(!decodes(call) || call.inner_precise <= 1, "inner_precise",
          std::to_string(call.inner_precise) + " is not supported for one query row (0 or 1)");
  if (call.packed()) {
    require(call.batch <= 4096, call.names.query_lengths,
            std::to_string(call.batch) + " sequences exceed 4096 in " + call.layout);
    const bool brain_heads = call.query.scalar_type() == at::kBFloat16 && call.heads == call.kv_heads;
    require(!brain_heads || !(call.inner_precise & 1), "inner_precise",
            std::to_string(call.inner_precise) +
                " is not supported for bfloat16 with as many key heads as query heads");
  }
  require_dense(call);
  if (call.has_rope()) {
    require_latent(call);
  } else {
    require_plain(call);
  }
  require_block_size(call);
  require_fused_mask(call);
  if (call.quantised()) require_quantised_kv(call);
  if (call.pse) {
    require(one_of(call.layout, {"BSH", "BSND", "BNSD", "BNSD_BSND"}) && !call.has_rope(), "pse_shift",
            "is not supported in the layout " + call.layout);
  }
  if (call.sink) call.sink->in({at::kBFloat16}).shaped({call.heads});
  Cost cost = planned_cost();
  cost.workspace = kLibraryWorkspace;
  costs(cost);
  return [call = std::move(call)] { attend(call); };
}

KvScales kv_scales(const Maybe& scale, const Maybe& offset, int64_t mode, const char* name) {
  return {scale, offset, scale || offset ? mode : -1, name};
}

const In& only(const InList& list, const char* name) {
  require(list.size() == 1, name, "a list of " + std::to_string(list.size()) + " tensors is not simulated");
  return list.front();
}

// The scalars that both forms take.
struct Settings {
  int64_t heads, kv_heads;
  double scale;
  int64_t pre, next;
  std::string layout;
  int64_t sparse_mode, inner_precise, block_size;
  bool wants_lse;
};

AttentionCall call_of(const In& query, const InList& key, const InList& value, const Settings& settings) {
  AttentionCall call;
  call.query = query;
  call.key = only(key, "key");
  call.value = only(value, "value");
  call.key.name = "key";
  call.value.name = "value";
  call.heads = settings.heads;
  call.kv_heads = settings.kv_heads;
  call.scale = settings.scale;
  call.pre = settings.pre;
  call.next = settings.next;
  call.layout = settings.layout;
  call.sparse_mode = settings.sparse_mode;
  call.inner_precise = settings.inner_precise;
  call.block_size = settings.block_size;
  call.wants_lse = settings.wants_lse;
  return call;
}

void require_unquantised(const std::vector<Maybe>& tensors) {
  for (const Maybe& tensor : tensors) require_absent(tensor);
}

// aclnnXGetMaxWorkspaceSize: a workspace of that size is allocated before a graph is captured.
#define MAX_WORKSPACE(name)                                                                             \
  extern "C" {                                                                                          \
  __attribute__((used)) static void (*name##_resolve_max())() {                                         \
    using Entry = ::ascend_sim::Entry<decltype(&name##Row::body)>;                                      \
    return reinterpret_cast<void (*)()>(&Entry::get_workspace_size<name##Row>);                         \
  }                                                                                                     \
  __attribute__((visibility("default"), ifunc(#name "_resolve_max"))) void name##GetMaxWorkspaceSize(); \
  }

}  // namespace

OPERATOR(aclnnFusedInferAttentionScoreV3,
         (In query, InList key, InList value, Maybe pse_shift, Maybe atten_mask, MaybeInts actual_seq_lengths,
          MaybeInts actual_seq_lengths_kv, Maybe dequant_scale1, Maybe quant_scale1, Maybe dequant_scale2,
          Maybe quant_scale2, Maybe quant_offset2, Maybe antiquant_scale, Maybe antiquant_offset,
          Maybe block_table, Maybe query_padding_size, Maybe kv_padding_size, Maybe key_antiquant_scale,
          Maybe key_antiquant_offset, Maybe value_antiquant_scale, Maybe value_antiquant_offset,
          Maybe key_shared_prefix, Maybe value_shared_prefix, MaybeInts actual_shared_prefix_len,
          Maybe query_rope, Maybe key_rope, Maybe key_rope_antiquant_scale, int64_t num_heads, double scale,
          int64_t pre_tokens, int64_t next_tokens, Text input_layout, int64_t num_key_value_heads,
          int64_t sparse_mode, int64_t inner_precise, int64_t block_size, int64_t antiquant_mode,
          bool softmax_lse_flag, int64_t key_antiquant_mode, int64_t value_antiquant_mode, Out attention_out,
          MaybeOut softmax_lse),
         {
           (void)antiquant_mode;  // of antiquant_scale
           require_unquantised({dequant_scale1, quant_scale1, dequant_scale2, quant_scale2, quant_offset2,
                                antiquant_scale, antiquant_offset, query_padding_size, kv_padding_size,
                                key_rope_antiquant_scale});
           AttentionCall call =
               call_of(query, key, value,
                       {num_heads, num_key_value_heads, scale, pre_tokens, next_tokens, input_layout,
                        sparse_mode, inner_precise, block_size, softmax_lse_flag});
           call.pse = pse_shift;
           call.mask = atten_mask;
           call.block_table = block_table;
           call.query_rope = query_rope;
           call.key_rope = key_rope;
           call.key_prefix = key_shared_prefix;
           call.value_prefix = value_shared_prefix;
           call.prefix_length = actual_shared_prefix_len;
           call.query_lengths = actual_seq_lengths;
           call.kv_lengths = actual_seq_lengths_kv;
           call.key_scales =
               kv_scales(key_antiquant_scale, key_antiquant_offset, key_antiquant_mode, "key_antiquant_scale");
           call.value_scales = kv_scales(value_antiquant_scale, value_antiquant_offset, value_antiquant_mode,
                                         "value_antiquant_scale");
           call.out = attention_out;
           call.lse = softmax_lse;
           return fused(std::move(call));
         })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV3)

OPERATOR(aclnnFusedInferAttentionScoreV4,
         (In query, InList key, InList value, Maybe pse_shift, Maybe atten_mask, MaybeInts actual_seq_qlen,
          MaybeInts actual_seq_kvlen, Maybe dequant_scale1, Maybe quant_scale1, Maybe dequant_scale2,
          Maybe quant_scale_out, Maybe quant_offset_out, Maybe antiquant_scale, Maybe antiquant_offset,
          Maybe block_table, Maybe query_padding_size, Maybe kv_padding_size, Maybe dequant_scale_key,
          Maybe dequant_offset_key, Maybe dequant_scale_value, Maybe dequant_offset_value,
          Maybe key_shared_prefix, Maybe value_shared_prefix, MaybeInts actual_shared_prefix_len,
          Maybe query_rope, Maybe key_rope, Maybe dequant_scale_key_rope, Maybe dequant_scale_query,
          Maybe learnable_sink, int64_t num_query_heads, double softmax_scale, int64_t pre_tokens,
          int64_t next_tokens, Text input_layout, int64_t num_key_value_heads, int64_t sparse_mode,
          int64_t inner_precise, int64_t block_size, int64_t antiquant_mode, bool return_softmax_lse,
          int64_t key_quant_mode, int64_t value_quant_mode, int64_t query_quant_mode, Out attention_out,
          MaybeOut softmax_lse),
         {
           (void)antiquant_mode, (void)query_quant_mode;  // of antiquant_scale and dequant_scale_query
           require_unquantised({dequant_scale1, quant_scale1, dequant_scale2, quant_scale_out, quant_offset_out,
                                antiquant_scale, antiquant_offset, query_padding_size, kv_padding_size,
                                dequant_scale_key_rope, dequant_scale_query});
           AttentionCall call =
               call_of(query, key, value,
                       {num_query_heads, num_key_value_heads, softmax_scale, pre_tokens, next_tokens,
                        input_layout, sparse_mode, inner_precise, block_size, return_softmax_lse});
           call.names.query_lengths = "actual_seq_qlen";
           call.names.kv_lengths = "actual_seq_kvlen";
           call.names.heads = "num_query_heads";
           call.pse = pse_shift;
           call.mask = atten_mask;
           call.block_table = block_table;
           call.query_rope = query_rope;
           call.key_rope = key_rope;
           call.key_prefix = key_shared_prefix;
           call.value_prefix = value_shared_prefix;
           call.prefix_length = actual_shared_prefix_len;
           call.sink = learnable_sink;
           call.query_lengths = actual_seq_qlen;
           call.kv_lengths = actual_seq_kvlen;
           call.key_scales =
               kv_scales(dequant_scale_key, dequant_offset_key, key_quant_mode, "dequant_scale_key");
           call.value_scales =
               kv_scales(dequant_scale_value, dequant_offset_value, value_quant_mode, "dequant_scale_value");
           call.out = attention_out;
           call.lse = softmax_lse;
           return fused(std::move(call));
         })
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV4)

}  // namespace ascend_sim
