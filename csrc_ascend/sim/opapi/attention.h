// The attention operators (fused, prompt, incremental, training-style) share one call, one set of checks and
// one reference computation. An operator's row fills an AttentionCall; `resolve` reads shapes and lengths into
// it; the operator's own rules come next; `attend` is the work.
#pragma once

#include <string>
#include <vector>

#include "sim/opapi/table.h"

namespace ascend_sim {

// The order of axes of a query, key, value or output: B batch, S sequence, N heads, D head size, H = N * D, and
// T = tokens of all sequences one after another.
enum class Axes { TND, NTD, BSH, BSND, BNSD, NBSD, SBH };

// Names of arguments in the operator's interface, for error messages.
struct AttentionNames {
  std::string query_lengths = "actual_seq_lengths";
  std::string kv_lengths = "actual_seq_lengths_kv";
  std::string heads = "num_heads";
  std::string kv_heads = "num_key_value_heads";
  std::string pre = "pre_tokens";
  std::string next = "next_tokens";
  std::string lse = "softmax_lse";
};

// How numbers of a key or value in one byte become floats: (byte + offset) * scale.
struct KvScales {
  Maybe scale, offset;
  // kPerChannel or kPagedPerTokenHead; -1: there are none.
  int64_t mode = -1;
  std::string name;  // of the argument `scale`
};
constexpr int64_t kPerChannel = 0;         // or one for all; in the dtype of the query
constexpr int64_t kPagedPerTokenHead = 5;  // (blocks, N, block size), float32

// Rows of one sequence: where they start among the T tokens (0 if the layout has a batch axis) and how many.
struct Span {
  int64_t start;
  int64_t length;
};

struct AttentionCall {
  // As given.
  In query, key, value;
  Maybe pse, mask, block_table, query_rope, key_rope, sink;
  // Keys and values in front of those of every sequence, with a batch of one, and how many of them count.
  Maybe key_prefix, value_prefix;
  MaybeInts prefix_length;
  MaybeInts query_lengths, kv_lengths;
  KvScales key_scales, value_scales;
  int64_t heads = 0, kv_heads = 0;
  double scale = 1.0;
  int64_t pre = 0, next = 0;
  std::string layout;
  int64_t sparse_mode = 0, inner_precise = 0, block_size = 0;
  Out out;
  MaybeOut lse;
  bool wants_lse = false;
  MaybeOut row_max, row_sum;  // of the training operators: (B, N, S, 8) or NTD, each value eight times
  // The positional bias is added before the product is scaled (training operators) or after (inference ones).
  bool scale_bias = false;
  AttentionNames names;

  // Filled by `resolve`.
  Axes axes = Axes::BSH, out_axes = Axes::BSH;
  int64_t batch = 0;
  int64_t query_rows = 0;   // S of the layouts with a batch axis, the longest sequence of the others
  int64_t prefix_rows = 0;  // that every sequence has in front
  int64_t kv_rows = 0;      // S of key and value with the prefix, or what a block table can hold
  int64_t query_dim = 0, value_dim = 0;     // D, without the part that ropes add
  std::vector<Span> query_spans, kv_spans;  // those of keys with the prefix

  bool paged() const { return block_table.has_value(); }
  bool packed() const { return axes == Axes::TND || axes == Axes::NTD; }
  bool quantised() const { return key_scales.mode >= 0; }
  bool has_prefix() const { return key_prefix.has_value(); }
  bool has_rope() const { return query_rope.has_value(); }
};

// Reads the layout ("TND", or "BNSD_BSND": in and out) and the shapes, lengths and block table that go with it,
// and refuses what contradicts: ranks, heads that do not divide, lengths that do not fit, caches of another
// shape.
void resolve(AttentionCall& call);

// Rules that more than one operator has; see the operators' documentation.
void require_dtypes(const AttentionCall& call, const Dtypes& allowed);
void require_layout(const AttentionCall& call, const std::vector<std::string>& allowed);
void require_mask(const AttentionCall& call);
void require_dense(const AttentionCall& call);

// Rejects quantisation and padding arguments that the simulated operator does not support.
void require_absent(const Maybe& tensor);

// Keys and values in one byte each: what the fused operator takes of them.
void require_quantised_kv(const AttentionCall& call);
// Rows of one sequence as floats. `bytes` (heads, length, dim) are the rows, `ids` its blocks on the host.
at::Tensor dequantised(const AttentionCall& call, const KvScales& scales, const at::Tensor& bytes,
                       at::IntArrayRef ids);

// The work: reads the tensors of the call and writes its output.
void attend(const AttentionCall& call);

// Shared with the cache operators. A paged cache comes as (blocks, block size, H), (blocks, N, block size, D)
// or, in the fractal layout, (blocks, N, D/16, block size, 16).
struct CacheShape {
  int64_t blocks, block_size, heads, dim;
};
CacheShape cache_shape(const In& cache, int64_t heads);
// Rows [0, length) of one sequence, as (heads, length, dim). `ids` are its block ids on the host.
at::Tensor cached_rows(const In& cache, const CacheShape& shape, at::IntArrayRef ids, int64_t length);

std::string shape_text(at::IntArrayRef sizes);
inline int64_t blocks_for(int64_t tokens, int64_t block_size) { return (tokens + block_size - 1) / block_size; }

}  // namespace ascend_sim
