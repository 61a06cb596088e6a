#include <cstring>

#include "cpu/bind/buffer.h"
#include "cpu/bind/paged.h"
#include "cpu/bind/panels.h"
#include "cpu/bind/tape.h"
#include "cpu/kernels/latent_expanded.h"
#include "cpu/kernels/latent_heads.h"
#include "cpu/kernels/latent_plan.h"
#include "cpu/kernels/latent_store.h"

namespace ascend_vllm {
namespace {

void check_width(int64_t width, const char* name) {
  TORCH_CHECK(width > 0 && width % 8 == 0, name, " must be a multiple of 8, got ", width);
}

// Scales of a layer's cache, as the ops have them.
struct RowScales {
  const std::optional<at::Tensor>& own;
  double of_all;
};

// Whether the rows of a block are contiguous.
bool has_dense_blocks(const at::Tensor& x) {
  return x.stride(2) == 1 && x.stride(1) == x.size(2) &&
         (x.size(0) < 2 || x.stride(0) >= x.size(1) * x.size(2));
}

// Checks the cache of a layer, [P, S, W], whose latents have `latent_width` numbers; queries are `like`.
LatentCache latent_cache(const at::Tensor& cache, const at::Tensor& like, int64_t latent_width,
                         const RowScales& scales) {
  LatentCache made{};
  made.format = cache_format_of(cache, "cache", like);
  const bool is_bytes = made.format != CacheFormat::kSame;
  TORCH_CHECK(
      cache.dim() == 3 && (is_bytes ? has_dense_blocks(cache) : cache.is_contiguous()),
      "cache must be a contiguous tensor [blocks, block size, width], or of bytes in contiguous blocks, "
      "got shape ",
      cache.sizes(), " and strides ", cache.strides());
  made.block_size = cache.size(1);
  made.latent_width = latent_width;
  made.row_width = cache.size(2);
  made.rows = const_cast<void*>(cache.const_data_ptr());
  made.block_stride = cache.stride(0);
  made.scale = static_cast<float>(scales.of_all);
  TORCH_CHECK(made.scale > 0, "row_scale must be positive, got ", scales.of_all);
  TORCH_CHECK(is_bytes || (made.scale == 1 && !scales.own.has_value()), "a cache in ", like.scalar_type(),
              " has no scales");
  TORCH_CHECK(!is_bytes || made.row_width <= kMaxLatentRow, "a cache of bytes has rows of at most ",
              kMaxLatentRow, " numbers, got ", made.row_width);
  if (!scales.own.has_value()) return made;
  const at::Tensor& own = *scales.own;
  TORCH_CHECK(made.scale == 1, "numbers with scales of their own have no row_scale");
  TORCH_CHECK(own.scalar_type() == at::kBFloat16 && own.dim() == 3 && own.size(0) == cache.size(0) &&
                  own.size(1) == cache.size(1) && own.size(2) == 2 && has_dense_blocks(own),
              "row_scales must be a bfloat16 tensor [blocks, block size, 2] of contiguous blocks, got ",
              own.scalar_type(), " of shape ", own.sizes(), " and strides ", own.strides());
  made.scales = static_cast<bfloat16*>(const_cast<void*>(own.const_data_ptr()));
  made.scale_block_stride = own.stride(0);
  return made;
}

void check_scale(double scale) { TORCH_CHECK(scale > 0.0, "scale must be greater than 0, got ", scale); }

void check_heads(const at::Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 3, name, " must be [tokens, heads, width], got ", x.sizes());
  check_rows(x, name);
}

void store_latent(const at::Tensor& positions, const at::Tensor& query_rope, const at::Tensor& latent,
                  const at::Tensor& weight, double epsilon, const at::Tensor& cos_sin_cache, bool is_neox,
                  const at::Tensor& cache, const at::Tensor& slot_mapping,
                  const std::optional<at::Tensor>& row_scales, double row_scale) {
  check_heads(query_rope, "query_rope");
  const LatentCache latents = latent_cache(cache, query_rope, weight.numel(), {row_scales, row_scale});
  const int64_t tokens = query_rope.size(0), rotary = query_rope.size(2), width = cache.size(2) - rotary;
  check_vector(positions, "positions", at::kLong, tokens);
  check_vector(slot_mapping, "slot_mapping", at::kLong, tokens);
  check_same_dtype(latent, "latent", query_rope);
  TORCH_CHECK(latent.dim() == 2 && latent.size(0) == tokens && latent.size(1) == cache.size(2),
              "latent must be [", tokens, ", ", cache.size(2), "], got ", latent.sizes());
  check_rows(latent, "latent");
  check_vector(weight, "weight", query_rope.scalar_type(), width);
  TORCH_CHECK(cos_sin_cache.dim() == 2 && cos_sin_cache.scalar_type() == at::kFloat &&
                  cos_sin_cache.is_contiguous() && cos_sin_cache.size(1) == rotary && rotary % 2 == 0,
              "cos_sin_cache must be a contiguous float32 matrix with ", rotary,
              " columns, an even number, got ", cos_sin_cache.scalar_type(), " of shape ",
              cos_sin_cache.sizes());
  const StoreLatentArgs args{
      .dtype = dtype_of(query_rope, "query_rope"),
      .positions = positions.const_data_ptr<int64_t>(),
      .query = query_rope.mutable_data_ptr(),
      .query_token_stride = query_rope.stride(0),
      .query_head_stride = query_rope.stride(1),
      .latent = latent.const_data_ptr(),
      .latent_stride = latent.stride(0),
      .weight = weight.const_data_ptr(),
      .cos_sin = cos_sin_cache.const_data_ptr<float>(),
      .cache = latents,
      .slots = slot_mapping.const_data_ptr<int64_t>(),
      .tokens = tokens,
      .heads = query_rope.size(1),
      .width = width,
      .rotary = rotary,
      .epsilon = static_cast<float>(epsilon),
      .is_neox = is_neox,
  };
  launch([args, num_positions = cos_sin_cache.size(0), num_slots = cache.size(0) * cache.size(1)] {
    check_positions(args.positions, args.tokens, num_positions);
    check_slots(args.slots, args.tokens, num_slots);
    store_latent_kernel(args);
  });
}

at::Tensor heads_linear(const at::Tensor& x, const at::Tensor& packed, int64_t in_features,
                        int64_t out_features) {
  check_heads(x, "x");
  check_same_dtype(packed, "packed", x);
  const int64_t tokens = x.size(0), heads = x.size(1);
  TORCH_CHECK(in_features <= x.size(2) && packed.dim() > 3 && packed.size(0) == heads &&
                  holds_stack(packed, in_features, (out_features + 15) / 16),
              "packed has shape ", packed.sizes(), ", not that of ", heads, " ", x.scalar_type(),
              " weights of ", in_features, " inputs, of ", x.size(2), ", and ", out_features, " outputs");
  HeadsLinearArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = x.const_data_ptr();
  args.x_token_stride = x.stride(0);
  args.x_head_stride = x.stride(1);
  args.packed = packed.const_data_ptr();
  args.tokens = tokens;
  args.heads = heads;
  args.in_features = in_features;
  args.out_features = out_features;
  args.further = x.size(2) - in_features;
  const int64_t shape[] = {tokens, heads, out_features + args.further};
  at::Tensor out = new_tensor(shape, x.options());
  at::Tensor workspace;
  if (x.scalar_type() != at::kFloat) {
    workspace = new_tensor({heads * linear_workspace(tokens, in_features)}, x.options().dtype(at::kFloat));
    args.workspace = workspace.mutable_data_ptr();
  }
  args.out = out.mutable_data_ptr();
  launch([args] { heads_linear_kernel(args); });
  return out;
}

// Memory that a calling thread reuses.
struct Workspace {
  LatentPlan plan;
  Buffer parts, scratch, memory;
};
Workspace& workspace() {
  thread_local Workspace own;
  return own;
}

// A call of latent_attention as numbers and addresses; the memory is read when it runs.
struct LatentCall {
  LatentAttentionArgs args;
  PagedSequences sequences;
  int64_t token_bytes;  // of the output
  int threads;

  void zero_rows(int64_t begin, int64_t end) const {
    if (begin < end)
      std::memset(static_cast<char*>(args.out) + begin * token_bytes, 0, (end - begin) * token_bytes);
  }

  void run() const {
    sequences.check();
    zero_rows(0, args.query_start[0]);
    zero_rows(args.query_start[sequences.count], sequences.tokens);
    Workspace& own = workspace();
    LatentPlan& plan = own.plan;
    plan.make(args, sequences.count, threads);
    LatentAttentionArgs planned = args;
    planned.items = plan.items.data();
    planned.num_items = static_cast<int64_t>(plan.items.size());
    planned.merges = plan.merges.data();
    planned.parts = own.parts.floats(plan.part_floats);
    planned.threads = plan.threads;
    planned.scratch_stride = latent_scratch_floats(args.width, args.value_width);
    if (args.cache.format != CacheFormat::kSame) planned.scratch_stride += latent_widened_floats(args.width);
    planned.scratch = own.scratch.floats(planned.threads * planned.scratch_stride);
    latent_attention_kernel(planned);
  }
};

// The op with a given number of threads; 0: chosen by the amount of work.
at::Tensor latent_attention_with(const at::Tensor& query, const at::Tensor& cache,
                                 const at::Tensor& block_table, const at::Tensor& query_start,
                                 const at::Tensor& seq_lens, double scale, int64_t value_width, int64_t threads,
                                 const std::optional<at::Tensor>& row_scales, double row_scale) {
  check_heads(query, "query");
  const LatentCache latents = latent_cache(cache, query, value_width, {row_scales, row_scale});
  const int64_t tokens = query.size(0), heads = query.size(1), width = query.size(2);
  check_width(width, "query's width");
  check_width(value_width, "value_width");
  check_scale(scale);
  TORCH_CHECK(cache.size(2) == width && value_width <= width, "query has a width of ", width, " and values of ",
              value_width, ", the cache's rows have ", cache.size(2));
  TORCH_CHECK(heads > 0 && threads >= 0, "query has no heads");
  const PagedSequences sequences =
      paged_sequences(block_table, query_start, seq_lens, tokens, cache.size(0), cache.size(1), 0);
  at::Tensor out = new_tensor({tokens, heads, value_width}, query.options());
  LatentAttentionArgs args{};
  args.dtype = dtype_of(query, "query");
  args.query = query.const_data_ptr();
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.cache = latents;
  args.out = out.mutable_data_ptr();
  args.block_table = sequences.block_table;
  args.block_table_stride = sequences.block_table_stride;
  args.query_start = sequences.query_start;
  args.seq_lens = sequences.seq_lens;
  args.heads = heads;
  args.width = width;
  args.value_width = value_width;
  args.block_shift = sequences.block_shift;
  args.scale = static_cast<float>(scale);
  const LatentCall call{
      .args = args,
      .sequences = sequences,
      .token_bytes = heads * value_width * query.element_size(),
      .threads = static_cast<int>(threads),
  };
  launch([call] { call.run(); });
  return out;
}

at::Tensor latent_attention(const at::Tensor& query, const at::Tensor& cache, const at::Tensor& block_table,
                            const at::Tensor& query_start, const at::Tensor& seq_lens, double scale,
                            int64_t value_width, const std::optional<at::Tensor>& row_scales,
                            double row_scale) {
  return latent_attention_with(query, cache, block_table, query_start, seq_lens, scale, value_width, 0,
                               row_scales, row_scale);
}

// Keys and values of as many heads are computed at a time as fit into this memory, for each thread.
constexpr int64_t kExpandedBytes = int64_t{8} << 20;

void expanded_attention(const at::Tensor& query, const at::Tensor& cache, const at::Tensor& keys,
                        const at::Tensor& values, const at::Tensor& block_table, const at::Tensor& query_start,
                        const at::Tensor& seq_lens, double scale, const at::Tensor& out,
                        const std::optional<at::Tensor>& row_scales, double row_scale) {
  check_heads(query, "query");
  check_same_dtype(keys, "keys", query);
  check_same_dtype(values, "values", query);
  check_same_dtype(out, "out", query);
  const int64_t tokens = query.size(0), heads = query.size(1), width = query.size(2);
  TORCH_CHECK(out.dim() == 3 && out.size(0) == tokens && out.size(1) == heads && out.is_contiguous(),
              "out must be a contiguous tensor [", tokens, ", ", heads, ", value width], got ", out.sizes());
  TORCH_CHECK(keys.dim() > 3 && values.dim() > 3, "keys and values must be stacks of packed weights, got ",
              keys.sizes(), " and ", values.sizes());
  const int64_t latent = keys.size(2) * (keys.dim() == 5 ? 2 : 1);
  const LatentCache latents = latent_cache(cache, query, latent, {row_scales, row_scale});
  const int64_t rotary = latents.row_width - latent;
  const int64_t nope = width - rotary, value_width = out.size(2);
  check_width(width, "query's width");
  check_width(latent, "the latents' width");
  check_width(value_width, "the values' width");
  check_scale(scale);
  TORCH_CHECK(rotary >= 0 && nope >= 0 && keys.size(0) == heads && values.size(0) == heads &&
                  holds_stack(keys, latent, (nope + 15) / 16) &&
                  holds_stack(values, latent, (value_width + 15) / 16),
              "keys and values have shapes ", keys.sizes(), " and ", values.sizes(), ", not those of ", heads,
              " heads with queries of ", width, " and values of ", value_width, ", with cached rows of ",
              cache.size(2));
  const PagedSequences sequences =
      paged_sequences(block_table, query_start, seq_lens, tokens, cache.size(0), cache.size(1), 0);
  sequences.check();
  ExpandedAttentionArgs args{};
  args.dtype = dtype_of(query, "query");
  args.query = query.const_data_ptr();
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.cache = latents;
  args.keys = keys.const_data_ptr();
  args.values = values.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.block_table = sequences.block_table;
  args.block_table_stride = sequences.block_table_stride;
  args.query_start = sequences.query_start;
  args.seq_lens = sequences.seq_lens;
  args.sequences = sequences.count;
  args.heads = heads;
  args.latent = latent;
  args.rotary = rotary;
  args.nope = nope;
  args.value_width = value_width;
  args.block_shift = sequences.block_shift;
  args.scale = static_cast<float>(scale);
  int64_t longest = 0, work = 0;
  for (int64_t s = 0; s < sequences.count; ++s) {
    const int64_t of_row = args.query_start[s + 1] - args.query_start[s];
    if (of_row == 0) continue;
    longest = std::max<int64_t>(longest, args.seq_lens[s]);
    work += heads * args.seq_lens[s] * (of_row * (width + value_width) / 2 + latent * (nope + value_width)) / 8;
  }
  if (longest == 0) return;
  args.threads = threads_for(work);
  const int64_t head_bytes = expanded_rows(longest) * (width + value_width) * query.element_size();
  args.heads_together = std::clamp<int64_t>(args.threads * kExpandedBytes / head_bytes, 1, heads);
  Workspace& own = workspace();
  args.memory = reinterpret_cast<char*>(own.memory.floats((args.heads_together * head_bytes + 3) / 4));
  args.scratch_stride = expanded_scratch_floats(latent, width, value_width);
  args.scratch = own.scratch.floats(args.threads * args.scratch_stride);
  expanded_attention_kernel(args);
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("store_latent", &ascend_vllm::store_latent);
  m.impl("heads_linear", &ascend_vllm::heads_linear);
  m.impl("latent_attention", &ascend_vllm::latent_attention);
  m.impl("expanded_attention", &ascend_vllm::expanded_attention);
}

// For tests and benchmarks: the same kernel with a given number of threads.
TORCH_LIBRARY_FRAGMENT(ascend_vllm, m) {
  m.def(
      "_latent_attention_with(Tensor query, Tensor cache, Tensor block_table, Tensor query_start, Tensor "
      "seq_lens, "
      "float scale, int value_width, int threads, Tensor? row_scales=None, float row_scale=1.0) -> Tensor");
  m.impl("_latent_attention_with", c10::DispatchKey::CPU, &ascend_vllm::latent_attention_with);
}
