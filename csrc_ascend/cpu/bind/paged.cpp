#include "cpu/bind/paged.h"

#include <cstring>

#include "cpu/bind/buffer.h"
#include "cpu/bind/tape.h"
#include "cpu/kernels/paged_plan.h"
#include "cpu/kernels/paged_store.h"

namespace ascend_vllm {
namespace {

void store_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& slot_mapping,
              const std::optional<at::Tensor>& key_scales, const std::optional<at::Tensor>& value_scales,
              double k_scale, double v_scale) {
  TORCH_CHECK(key.dim() == 3 && value.sizes() == key.sizes(),
              "key and value must be [tokens, KV heads, head size] of one shape, got ", key.sizes(), " and ",
              value.sizes());
  check_rows(key, "key");
  check_rows(value, "value");
  check_same_dtype(value, "value", key);
  const PagedCache cache =
      paged_cache(key_cache, value_cache, key, key.size(2), {key_scales, value_scales, k_scale, v_scale});
  TORCH_CHECK(cache.kv_heads == key.size(1), "key_cache must have ", key.size(1), " KV heads, got ",
              cache.kv_heads);
  const int64_t tokens = key.size(0);
  check_vector(slot_mapping, "slot_mapping", at::kLong, tokens);
  const StoreKvArgs args{
      .dtype = dtype_of(key, "key"),
      .key = key.const_data_ptr(),
      .value = value.const_data_ptr(),
      .cache = cache,
      .slots = slot_mapping.const_data_ptr<int64_t>(),
      .tokens = tokens,
      .key_token_stride = key.stride(0),
      .key_head_stride = key.stride(1),
      .value_token_stride = value.stride(0),
      .value_head_stride = value.stride(1),
  };
  launch([args, num_slots = key_cache.size(0) * key_cache.size(2)] {
    check_slots(args.slots, args.tokens, num_slots);
    store_kv_kernel(args);
  });
}

// Memory that a calling thread reuses.
struct Workspace {
  PagedPlan plan;
  Buffer parts, scratch;
};

// A call of the op as numbers and addresses; the memory is read when it runs.
struct PagedCall {
  PagedAttentionArgs args;
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
    thread_local Workspace workspace;
    PagedPlan& plan = workspace.plan;
    plan.make(args, sequences.count, threads);
    PagedAttentionArgs planned = args;
    planned.items = plan.items.data();
    planned.num_items = static_cast<int64_t>(plan.items.size());
    planned.merges = plan.merges.data();
    planned.parts = workspace.parts.floats(plan.part_floats);
    planned.threads = plan.threads;
    const int64_t size = args.cache.head_size;
    const bool is_widened = args.cache.format != CacheFormat::kSame;
    planned.scratch_stride = paged_scratch_floats(size) + (is_widened ? widened_scratch_floats(size) : 0);
    planned.scratch = workspace.scratch.floats(planned.threads * planned.scratch_stride);
    paged_attention_kernel(planned);
  }
};

// The op with a given split of the work: split_keys 0 never splits, threads 0 chooses by the amount of work.
at::Tensor paged_attention_cut(const at::Tensor& query, const at::Tensor& key_cache,
                               const at::Tensor& value_cache, const at::Tensor& block_table,
                               const at::Tensor& query_start, const at::Tensor& seq_lens, double scale,
                               int64_t sliding_window, int64_t split_keys, int64_t threads, double soft_cap,
                               const std::optional<at::Tensor>& alibi_slopes,
                               const std::optional<at::Tensor>& key_scales,
                               const std::optional<at::Tensor>& value_scales, double k_scale, double v_scale) {
  TORCH_CHECK(query.dim() == 3, "query must be [tokens, heads, head size], got ", query.sizes());
  check_rows(query, "query");
  const int64_t tokens = query.size(0), heads = query.size(1), size = query.size(2);
  TORCH_CHECK(size >= 16 && size <= 256 && size % 8 == 0,
              "head size must be a multiple of 8 from 16 to 256, got ", size);
  const PagedCache cache =
      paged_cache(key_cache, value_cache, query, size, {key_scales, value_scales, k_scale, v_scale});
  const int64_t kv_heads = cache.kv_heads;
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, heads, " query heads cannot share ", kv_heads,
              " KV heads evenly");
  TORCH_CHECK(sliding_window >= 0, "sliding_window must be 0 (none) or positive, got ", sliding_window);
  TORCH_CHECK(soft_cap >= 0, "soft_cap must be 0 (none) or positive, got ", soft_cap);
  if (alibi_slopes.has_value()) check_vector(*alibi_slopes, "alibi_slopes", at::kFloat, heads);
  TORCH_CHECK(split_keys >= 0 && split_keys % 128 == 0 && threads >= 0, "split_keys must be a multiple of 128");
  TORCH_CHECK(cache.format == CacheFormat::kSame || kMaxWidenedKeys % std::max<int64_t>(split_keys, 1) == 0,
              "split_keys must divide ", kMaxWidenedKeys, " for a cache of bytes, got ", split_keys);

  const PagedSequences sequences = paged_sequences(block_table, query_start, seq_lens, tokens,
                                                   key_cache.size(0), key_cache.size(2), sliding_window);

  at::Tensor out = new_tensor(query.sizes(), query.options());
  PagedAttentionArgs args{};
  args.dtype = dtype_of(query, "query");
  args.query = query.const_data_ptr();
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.cache = cache;
  args.out = out.mutable_data_ptr();
  args.block_table = sequences.block_table;
  args.block_table_stride = sequences.block_table_stride;
  args.query_start = sequences.query_start;
  args.seq_lens = sequences.seq_lens;
  args.heads = heads;
  args.block_shift = sequences.block_shift;
  args.window = sliding_window;
  args.scale = static_cast<float>(scale * k_scale);
  args.soft_cap = static_cast<float>(soft_cap);
  args.slopes = alibi_slopes.has_value() ? alibi_slopes->const_data_ptr<float>() : nullptr;
  args.split_keys = split_keys;
  const PagedCall call{
      .args = args,
      .sequences = sequences,
      .token_bytes = heads * size * query.element_size(),
      .threads = static_cast<int>(threads),
  };
  launch([call] { call.run(); });
  return out;
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& block_table, const at::Tensor& query_start,
                           const at::Tensor& seq_lens, double scale, int64_t sliding_window, double soft_cap,
                           const std::optional<at::Tensor>& alibi_slopes,
                           const std::optional<at::Tensor>& key_scales,
                           const std::optional<at::Tensor>& value_scales, double k_scale, double v_scale) {
  return paged_attention_cut(query, key_cache, value_cache, block_table, query_start, seq_lens, scale,
                             sliding_window, kSplitKeys, 0, soft_cap, alibi_slopes, key_scales, value_scales,
                             k_scale, v_scale);
}

}  // namespace
}  // namespace ascend_vllm

TORCH_LIBRARY_IMPL(ascend_vllm, CPU, m) {
  m.impl("store_kv", &ascend_vllm::store_kv);
  m.impl("paged_attention", &ascend_vllm::paged_attention);
}

// For tests and benchmarks: the same kernel with a given split of the work.
TORCH_LIBRARY_FRAGMENT(ascend_vllm, m) {
  m.def(
      "_paged_attention_cut(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor query_start, Tensor seq_lens, float scale, int sliding_window, int split_keys, int threads, "
      "float soft_cap=0.0, Tensor? alibi_slopes=None, Tensor? key_scales=None, Tensor? value_scales=None, "
      "float k_scale=1.0, float v_scale=1.0) -> Tensor");
  m.impl("_paged_attention_cut", c10::DispatchKey::CPU, &ascend_vllm::paged_attention_cut);
}
