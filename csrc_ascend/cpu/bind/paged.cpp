#include "cpu/bind/paged.h"

#include <cstring>
#include <memory>
#include <new>

#include "cpu/bind/tape.h"
#include "cpu/kernels/paged_plan.h"
#include "cpu/kernels/paged_store.h"

namespace ascend_vllm {
namespace {

void store_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& slot_mapping) {
  TORCH_CHECK(key.dim() == 3 && value.sizes() == key.sizes(),
              "key and value must be [tokens, KV heads, head size] of one shape, got ", key.sizes(), " and ",
              value.sizes());
  check_rows(key, "key");
  check_rows(value, "value");
  check_same_dtype(value, "value", key);
  dtype_of(key, "key");
  check_caches(key_cache, value_cache, key, key.size(1), key.size(2));
  const int64_t tokens = key.size(0), bytes = key.element_size();
  check_vector(slot_mapping, "slot_mapping", at::kLong, tokens);
  const StoreKvArgs args{
      .key = static_cast<const char*>(key.const_data_ptr()),
      .value = static_cast<const char*>(value.const_data_ptr()),
      .key_cache = static_cast<char*>(key_cache.mutable_data_ptr()),
      .value_cache = static_cast<char*>(value_cache.mutable_data_ptr()),
      .slots = slot_mapping.const_data_ptr<int64_t>(),
      .tokens = tokens,
      .kv_heads = key.size(1),
      .block_size = key_cache.size(2),
      .head_bytes = key.size(2) * bytes,
      .key_token_bytes = key.stride(0) * bytes,
      .key_head_bytes = key.stride(1) * bytes,
      .value_token_bytes = value.stride(0) * bytes,
      .value_head_bytes = value.stride(1) * bytes,
  };
  launch([args, num_slots = key_cache.size(0) * key_cache.size(2)] {
    check_slots(args.slots, args.tokens, num_slots);
    store_kv_kernel(args);
  });
}

// Reusable memory that only grows.
class Buffer {
 public:
  float* floats(int64_t count) {
    if (count > size_) {
      memory_.reset(new (std::align_val_t{64}) float[count]);
      size_ = count;
    }
    return memory_.get();
  }

 private:
  struct Delete {
    void operator()(float* p) const { operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Delete> memory_;
  int64_t size_ = 0;
};

// Memory that a calling thread reuses.
struct Workspace {
  PagedPlan plan;
  Buffer parts, scratch;
};

int log2_of_block_size(int64_t block_size) {
  for (int shift = 4; shift <= 7; ++shift) {
    if (block_size == int64_t{1} << shift) return shift;
  }
  TORCH_CHECK(false, "block size must be 16, 32, 64 or 128, got ", block_size);
}

// The kernel does not check lengths and blocks, which are data, so this is done on every call and replay.
void check_sequences(const PagedAttentionArgs& args, int64_t sequences, int64_t tokens, int64_t table_width,
                     int64_t blocks) {
  const int32_t *starts = args.query_start, *lengths = args.seq_lens;
  TORCH_CHECK_INDEX(starts[0] >= 0 && starts[sequences] <= tokens, "query_start runs from ", starts[0], " to ",
                    starts[sequences], ", query has ", tokens, " tokens");
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t count = starts[s + 1] - starts[s];
    TORCH_CHECK_INDEX(count >= 0, "query_start descends after row ", s);
    if (count == 0) continue;
    TORCH_CHECK_INDEX(lengths[s] >= count, "row ", s, " has ", count, " query tokens and a length of ",
                      lengths[s]);
    const int64_t last = (lengths[s] - 1) >> args.block_shift;
    TORCH_CHECK_INDEX(last < table_width, "row ", s, " of length ", lengths[s], " needs ", last + 1,
                      " blocks, block_table has ", table_width);
    const int64_t oldest = args.window > 0 ? std::max<int64_t>(0, lengths[s] - count - args.window + 1) : 0;
    const int32_t* table = args.block_table + s * args.block_table_stride;
    uint32_t greatest = 0;  // unsigned, so that negative ids are too large
    for (int64_t b = oldest >> args.block_shift; b <= last; ++b) {
      greatest = std::max(greatest, static_cast<uint32_t>(table[b]));
    }
    TORCH_CHECK_INDEX(greatest < static_cast<uint64_t>(blocks), "block_table of row ", s, " holds block ",
                      static_cast<int32_t>(greatest), ", the cache has ", blocks);
  }
}

// A call of the op as numbers and addresses; the memory is read when it runs.
struct PagedCall {
  PagedAttentionArgs args;
  int64_t sequences, tokens, table_width, blocks;
  int64_t token_bytes;  // of the output
  int threads;

  void zero_rows(int64_t begin, int64_t end) const {
    if (begin < end)
      std::memset(static_cast<char*>(args.out) + begin * token_bytes, 0, (end - begin) * token_bytes);
  }

  void run() const {
    check_sequences(args, sequences, tokens, table_width, blocks);
    zero_rows(0, args.query_start[0]);
    zero_rows(args.query_start[sequences], tokens);
    thread_local Workspace workspace;
    PagedPlan& plan = workspace.plan;
    plan.make(args, sequences, threads);
    PagedAttentionArgs planned = args;
    planned.items = plan.items.data();
    planned.num_items = static_cast<int64_t>(plan.items.size());
    planned.merges = plan.merges.data();
    planned.parts = workspace.parts.floats(plan.part_floats);
    planned.threads = plan.threads;
    planned.scratch_stride = paged_scratch_floats(args.head_size);
    planned.scratch = workspace.scratch.floats(planned.threads * planned.scratch_stride);
    paged_attention_kernel(planned);
  }
};

// The op with a given split of the work: split_keys 0 never splits, threads 0 chooses by the amount of work.
at::Tensor paged_attention_cut(const at::Tensor& query, const at::Tensor& key_cache,
                               const at::Tensor& value_cache, const at::Tensor& block_table,
                               const at::Tensor& query_start, const at::Tensor& seq_lens, double scale,
                               int64_t sliding_window, int64_t split_keys, int64_t threads, double soft_cap,
                               const std::optional<at::Tensor>& alibi_slopes) {
  TORCH_CHECK(query.dim() == 3, "query must be [tokens, heads, head size], got ", query.sizes());
  check_rows(query, "query");
  const int64_t tokens = query.size(0), heads = query.size(1), size = query.size(2);
  TORCH_CHECK(size >= 16 && size <= 256 && size % 8 == 0,
              "head size must be a multiple of 8 from 16 to 256, got ", size);
  check_cache(key_cache, "key_cache", query, size);
  check_cache(value_cache, "value_cache", query, size);
  TORCH_CHECK(value_cache.sizes() == key_cache.sizes(), "key_cache and value_cache must have one shape, got ",
              key_cache.sizes(), " and ", value_cache.sizes());
  const int64_t kv_heads = key_cache.size(1), sequences = seq_lens.numel();
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, heads, " query heads cannot share ", kv_heads,
              " KV heads evenly");
  check_vector(seq_lens, "seq_lens", at::kInt, sequences);
  check_vector(query_start, "query_start", at::kInt, sequences + 1);
  TORCH_CHECK(
      block_table.scalar_type() == at::kInt && block_table.dim() == 2 && block_table.size(0) == sequences,
      "block_table must be an int32 matrix of ", sequences, " rows, got ", block_table.scalar_type(),
      " of shape ", block_table.sizes());
  check_rows(block_table, "block_table");
  TORCH_CHECK(sliding_window >= 0, "sliding_window must be 0 (none) or positive, got ", sliding_window);
  TORCH_CHECK(soft_cap >= 0, "soft_cap must be 0 (none) or positive, got ", soft_cap);
  if (alibi_slopes.has_value()) check_vector(*alibi_slopes, "alibi_slopes", at::kFloat, heads);
  TORCH_CHECK(split_keys >= 0 && split_keys % 128 == 0 && threads >= 0, "split_keys must be a multiple of 128");

  at::Tensor out = new_tensor(query.sizes(), query.options());
  PagedAttentionArgs args{};
  args.dtype = dtype_of(query, "query");
  args.query = query.const_data_ptr();
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.key_cache = key_cache.const_data_ptr();
  args.value_cache = value_cache.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.block_table = block_table.const_data_ptr<int32_t>();
  args.block_table_stride = block_table.stride(0);
  args.query_start = query_start.const_data_ptr<int32_t>();
  args.seq_lens = seq_lens.const_data_ptr<int32_t>();
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.head_size = size;
  args.block_shift = log2_of_block_size(key_cache.size(2));
  args.window = sliding_window;
  args.scale = static_cast<float>(scale);
  args.soft_cap = static_cast<float>(soft_cap);
  args.slopes = alibi_slopes.has_value() ? alibi_slopes->const_data_ptr<float>() : nullptr;
  args.split_keys = split_keys;
  const PagedCall call{
      .args = args,
      .sequences = sequences,
      .tokens = tokens,
      .table_width = block_table.size(1),
      .blocks = key_cache.size(0),
      .token_bytes = heads * size * query.element_size(),
      .threads = static_cast<int>(threads),
  };
  launch([call] { call.run(); });
  return out;
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& block_table, const at::Tensor& query_start,
                           const at::Tensor& seq_lens, double scale, int64_t sliding_window, double soft_cap,
                           const std::optional<at::Tensor>& alibi_slopes) {
  return paged_attention_cut(query, key_cache, value_cache, block_table, query_start, seq_lens, scale,
                             sliding_window, kSplitKeys, 0, soft_cap, alibi_slopes);
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
      "float soft_cap=0.0, Tensor? alibi_slopes=None) -> Tensor");
  m.impl("_paged_attention_cut", c10::DispatchKey::CPU, &ascend_vllm::paged_attention_cut);
}
