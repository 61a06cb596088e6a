// npu_fusion_attention and torch's scaled_dot_product_attention: aclnnFlashAttentionScore and, for sequences
// one after another, aclnnFlashAttentionVarLenScore. Only the forward pass without dropout is simulated.
#include "sim/opapi/attention.h"

namespace ascend_sim {
namespace {

Work training(AttentionCall call) {
  require(soc() != Soc::P310, "query", "the operator does not exist on Ascend310P");
  require_dtypes(call, kFloats);
  resolve(call);
  require_dense(call);
  require(call.query_dim <= 768, call.query.name,
          "head size " + std::to_string(call.query_dim) + " exceeds 768");
  require(call.value_dim <= call.query_dim, call.value.name, "the head size exceeds the query's");
  require(call.heads <= 256, call.names.heads, std::to_string(call.heads) + " exceeds 256");
  require(call.inner_precise >= 0 && call.inner_precise <= 2, "inner_precise",
          std::to_string(call.inner_precise) + " is not supported (0 to 2)");
  require(call.sparse_mode >= 0 && call.sparse_mode <= 8, "sparse_mode",
          std::to_string(call.sparse_mode) + " is not supported (0 to 8)");
  require(call.sparse_mode <= 4, "sparse_mode", std::to_string(call.sparse_mode) + " is not simulated");
  if (!call.mask) call.sparse_mode = 0;  // without a mask everything is seen
  if (call.mask) call.mask->in({at::kBool, at::kByte});
  require_mask(call);
  // The rows' statistics exist for the backward pass; the high-performance arithmetic is not one of this
  // operator.
  call.inner_precise &= 2;
  return [call = std::move(call)] { attend(call); };
}

// Sequences at the end that take no part have the cumulative length 0.
void drop_absent_tail(Ints& ends) {
  while (ends.size() > 1 && ends.back() == 0) ends.pop_back();
}

void require_plain(const Maybe& drop_mask, const Maybe& padding_mask, const MaybeInts& prefix,
                   double keep_prob) {
  require(keep_prob == 1.0 && !drop_mask, "keep_prob", "dropout is not simulated");
  require(!padding_mask, "padding_mask", "is not supported");
  require(!prefix || prefix->empty(), "prefix", "is not simulated");
}

AttentionNames training_names() {
  AttentionNames names;
  names.query_lengths = "actual_seq_qlen";
  names.kv_lengths = "actual_seq_kvlen";
  names.heads = "head_num";
  names.kv_heads = "key";
  names.pre = "pre_tockens";  // spelled so by the operator
  names.next = "next_tockens";
  return names;
}

// The number of key heads is not an argument: it follows from the shapes.
int64_t key_heads(const In& query, const In& key, const std::string& layout, int64_t heads) {
  require(heads > 0, "head_num", "must be greater than 0, is " + std::to_string(heads));
  if (layout == "BSH" || layout == "SBH") {
    query.rank(3, 3);
    key.rank(3, 3);
    const int64_t dim = query.size(2) / heads;
    require(dim > 0 && key.size(2) % dim == 0, "key",
            "the last axis of " + shape_text(key.sizes()) + " is no multiple of the head size " +
                std::to_string(dim));
    return key.size(2) / dim;
  }
  key.rank(layout == "TND" ? 3 : 4, layout == "TND" ? 3 : 4);
  return key.size(layout == "BSND" ? 2 : 1);
}

}  // namespace

OPERATOR(aclnnFlashAttentionScore,
         (In query, In key, In value, Maybe pse, Maybe drop_mask, Maybe padding_mask, Maybe atten_mask,
          MaybeInts prefix, double scale, double keep_prob, int64_t pre_tockens, int64_t next_tockens,
          int64_t head_num, Text input_layout, int64_t inner_precise, int64_t sparse_mode, Out softmax_max,
          Out softmax_sum, MaybeOut softmax_out, Out attention_out),
         {
           (void)softmax_out;
           require_plain(drop_mask, padding_mask, prefix, keep_prob);
           AttentionCall call;
           call.query = query;
           call.key = key;
           call.value = value;
           call.pse = pse;
           call.mask = atten_mask;
           call.heads = head_num;
           call.scale = scale;
           call.scale_bias = true;
           call.pre = pre_tockens;
           call.next = next_tockens;
           call.layout = input_layout;
           call.inner_precise = inner_precise;
           call.sparse_mode = sparse_mode;
           call.row_max = softmax_max;
           call.row_sum = softmax_sum;
           call.out = attention_out;
           call.names = training_names();
           require_layout(call, {"BSH", "SBH", "BSND", "BNSD"});
           call.kv_heads = key_heads(query, key, call.layout, head_num);
           return training(std::move(call));
         })

OPERATOR(aclnnFlashAttentionVarLenScore,
         (In query, In key, In value, Maybe pse, Maybe drop_mask, Maybe padding_mask, Maybe atten_mask,
          MaybeInts prefix, Ints actual_seq_qlen, Ints actual_seq_kvlen, double scale, double keep_prob,
          int64_t pre_tockens, int64_t next_tockens, int64_t head_num, Text input_layout, int64_t inner_precise,
          int64_t sparse_mode, Out softmax_max, Out softmax_sum, MaybeOut softmax_out, Out attention_out),
         {
           (void)softmax_out;
           require_plain(drop_mask, padding_mask, prefix, keep_prob);
           drop_absent_tail(actual_seq_qlen);
           drop_absent_tail(actual_seq_kvlen);
           AttentionCall call;
           call.query = query;
           call.key = key;
           call.value = value;
           call.pse = pse;
           call.mask = atten_mask;
           call.query_lengths = actual_seq_qlen;
           call.kv_lengths = actual_seq_kvlen;
           call.heads = head_num;
           call.scale = scale;
           call.scale_bias = true;
           call.pre = pre_tockens;
           call.next = next_tockens;
           call.layout = input_layout;
           call.inner_precise = inner_precise;
           call.sparse_mode = sparse_mode;
           call.row_max = softmax_max;
           call.row_sum = softmax_sum;
           call.out = attention_out;
           call.names = training_names();
           require_layout(call, {"TND"});
           call.kv_heads = key_heads(query, key, call.layout, head_num);
           return training(std::move(call));
         })

}  // namespace ascend_sim
