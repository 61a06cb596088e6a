// Writing and gathering of paged caches: aclnnScatterPaKvCache, aclnnGatherPaKvCache; and the step of decoding
// that stays on the device, aclnnAdvanceStep.
#include <algorithm>

#include "sim/opapi/aten.h"
#include "sim/opapi/attention.h"

namespace ascend_sim {
namespace {

// A cache as (blocks, block size, N, D) ("Norm") or fractal, (blocks, N * D / lane, block size, lane)
// ("PA_NZ"); the latter also with its heads apart, (blocks, N, D / lane, block size, lane).
struct PagedCache {
  int64_t blocks, block_size;
  bool fractal;
  int64_t lane;

  // The slots' rows, (blocks * block size, N * D), of a cache that is not fractal.
  static at::Tensor rows(const In& cache) { return cache.view({cache.size(0) * cache.size(1), -1}); }
};

bool is_fractal(const std::string& cache_mode) {
  require(cache_mode.empty() || cache_mode == "Norm" || cache_mode == "PA_NZ", "cache_mode",
          "\"" + cache_mode + "\" is neither Norm nor PA_NZ");
  return cache_mode == "PA_NZ";
}

PagedCache paged_cache(const In& cache, const In& rows, bool fractal) {
  const int64_t heads = rows.size(1), dim = rows.size(2);
  const std::string shape = "shape " + shape_text(cache.sizes());
  cache.dense();
  if (!fractal) {
    cache.rank(4, 4);
    require(cache.size(2) == heads && cache.size(3) == dim, cache.name,
            shape + " must be [blocks, block size, " + std::to_string(heads) + ", " + std::to_string(dim) +
                "] with cache_mode Norm");
    return {cache.size(0), cache.size(1), false, 0};
  }
  cache.rank(4, 5);
  const int64_t lane = 32 / cache.element_size();
  const int64_t columns = cache.dim() == 5 ? cache.size(1) * cache.size(2) : cache.size(1);
  require(
      cache.size(-1) == lane && columns * lane == heads * dim && (cache.dim() == 4 || cache.size(1) == heads),
      cache.name,
      shape + " must be [blocks, " + std::to_string(heads * dim / lane) + ", block size, " +
          std::to_string(lane) + "] with cache_mode PA_NZ");
  require(cache.size(-2) < 65535, cache.name, shape + " must have less than 65535 slots in a block");
  return {cache.size(0), cache.size(-2), true, lane};
}

void write(const In& cache, const PagedCache& shape, const at::Tensor& slots, const In& rows) {
  const at::Tensor flat = rows.reshape({rows.size(0), -1});
  if (!shape.fractal) {
    PagedCache::rows(cache).index_copy_(0, slots, flat);
    return;
  }
  const at::Tensor blocks = cache.view({shape.blocks, -1, shape.block_size, shape.lane}).transpose(1, 2);
  const c10::List<std::optional<at::Tensor>> place(
      {slots.div(shape.block_size, "floor"), slots.remainder(shape.block_size)});
  blocks.index_put_(place, flat.view({rows.size(0), -1, shape.lane}));
}

at::Tensor checked_slots(const In& mapping, int64_t room) {
  const at::Tensor slots = mapping.to(at::kLong);
  if (slots.numel() == 0) return slots;
  const int64_t low = slots.min().item<int64_t>(), high = slots.max().item<int64_t>();
  require(low >= 0 && high < room, mapping.name,
          "slot " + std::to_string(low < 0 ? low : high) + " is outside [0, " + std::to_string(room) + ")");
  const at::Tensor sorted = std::get<0>(slots.sort());
  const at::Tensor same = sorted.slice(0, 1).eq(sorted.slice(0, 0, -1));
  if (same.any().item<bool>()) {
    const int64_t twice = sorted.slice(0, 1).masked_select(same)[0].item<int64_t>();
    require(false, mapping.name, "slot " + std::to_string(twice) + " is given more than once");
  }
  return slots;
}

const Dtypes kCacheDtypes{at::kHalf, at::kBFloat16, at::kChar};

}  // namespace

OPERATOR(aclnnScatterPaKvCache,
         (In key, Out key_cache, In slot_mapping, In value, Out value_cache, Maybe compress_lens,
          Maybe compress_seq_offsets, Maybe seq_lens, Text cache_mode, Text scatter_mode, Ints strides,
          Ints offsets),
         {
           (void)strides, (void)offsets;  // of the scatter mode Nct
           require(soc() != Soc::P310, "key", "the operator does not exist on Ascend310P");
           require(!compress_lens, "compress_lens", "the compressed forms are not simulated");
           require(!compress_seq_offsets, "compress_seq_offsets", "the compressed forms are not simulated");
           require(!seq_lens, "seq_lens", "the compressed forms are not simulated");
           require(scatter_mode.empty() || scatter_mode == "None", "scatter_mode",
                   "\"" + scatter_mode + "\" is not simulated");
           const bool fractal = is_fractal(cache_mode);
           key.in(kCacheDtypes).rank(3, 3).dense();
           value.like(key).rank(3, 3).dense();
           key_cache.like(key);
           value_cache.like(key);
           slot_mapping.in(kIndices).shaped({key.size(0)}).dense();
           require(value.size(0) == key.size(0) && value.size(1) == key.size(1), "value",
                   "shape " + shape_text(value.sizes()) + " must begin like that of key " +
                       shape_text(key.sizes()));
           const PagedCache keys = paged_cache(key_cache, key, fractal);
           const PagedCache values = paged_cache(value_cache, value, fractal);
           require(keys.blocks == values.blocks && keys.block_size == values.block_size, "value_cache",
                   "shape " + shape_text(value_cache.sizes()) + " does not go with key_cache " +
                       shape_text(key_cache.sizes()));
           const int64_t stored = bytes_of(key) + bytes_of(value);
           costs({stored + bytes_of(slot_mapping), stored});
           return [=] {
             const at::Tensor slots = checked_slots(slot_mapping, keys.blocks * keys.block_size);
             write(key_cache, keys, slots, key);
             write(value_cache, values, slots, value);
           };
         })

namespace {

// Token counts of the sequences, from lengths or from their running sum that starts with 0.
std::vector<int64_t> gathered_lengths(const In& seq_lens, bool cumulative, int64_t sequences) {
  const at::Tensor given = seq_lens.to(at::kLong);
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t own = given[i].item<int64_t>();
    lengths.push_back(cumulative ? given[i + 1].item<int64_t>() - own : own);
    require(lengths.back() >= 0, seq_lens.name,
            "sequence " + std::to_string(i) + " has " + std::to_string(lengths.back()) + " tokens" +
                (cumulative ? " (cumulative lengths must not fall)" : ""));
  }
  return lengths;
}

struct Gather {
  In key_cache, value_cache, block_tables, seq_lens;
  Out key, value;
  Maybe seq_offset;
  PagedCache keys, values;
  bool cumulative;
};

at::Tensor gathered(const In& cache, const PagedCache& shape, at::IntArrayRef slots) {
  const at::Tensor index = at::tensor(slots, at::kLong);
  if (!shape.fractal) return PagedCache::rows(cache).index_select(0, index);
  const at::Tensor blocks = cache.view({shape.blocks, -1, shape.block_size, shape.lane}).transpose(1, 2);
  return blocks.reshape({shape.blocks * shape.block_size, -1}).index_select(0, index);
}

void gather(const Gather& call) {
  const int64_t sequences = call.block_tables.size(0), width = call.block_tables.size(1);
  const at::Tensor table = call.block_tables.to(at::kLong);
  const int64_t size = call.keys.block_size;
  const std::vector<int64_t> lengths = gathered_lengths(call.seq_lens, call.cumulative, sequences);
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t start = call.seq_offset ? (*call.seq_offset)[i].item<int64_t>() : 0;
    require(start >= 0 && start % size == 0, "seq_offset",
            std::to_string(start) + " of sequence " + std::to_string(i) +
                " must be a multiple of the block size " + std::to_string(size));
    require(start + lengths[i] <= width * size, call.seq_lens.name,
            "sequence " + std::to_string(i) + " reaches token " + std::to_string(start + lengths[i]) +
                ", but its row of the block table ends at " + std::to_string(width * size));
    for (int64_t token = start; token < start + lengths[i]; ++token) {
      const int64_t block = table[i][token / size].item<int64_t>();
      require(block >= 0 && block < call.keys.blocks, call.block_tables.name,
              "block " + std::to_string(block) + " is not one of the " + std::to_string(call.keys.blocks) +
                  " blocks of the cache");
      slots.push_back(block * size + token % size);
    }
  }
  require(static_cast<int64_t>(slots.size()) == call.key.size(0), "key",
          std::to_string(call.key.size(0)) + " rows for " + std::to_string(slots.size()) + " gathered tokens");
  call.key.set(gathered(call.key_cache, call.keys, slots).view(call.key.sizes()));
  call.value.set(gathered(call.value_cache, call.values, slots).view(call.value.sizes()));
}

}  // namespace

OPERATOR(aclnnGatherPaKvCache,
         (In key_cache, In value_cache, In block_tables, In seq_lens, Out key, Out value, Maybe seq_offset,
          Text cache_mode, bool is_seq_lens_cumsum),
         {
           require(soc() != Soc::P310, "key_cache", "the operator does not exist on Ascend310P");
           const bool fractal = is_fractal(cache_mode);
           key.in(kCacheDtypes).rank(3, 3).dense();
           value.in(kCacheDtypes).rank(3, 3).dense();
           key_cache.like(key);
           value_cache.like(value);
           block_tables.in(kIndices).rank(2, 2).dense();
           const int64_t sequences = block_tables.size(0);
           seq_lens.like(block_tables).shaped({sequences + (is_seq_lens_cumsum ? 1 : 0)});
           if (seq_offset) seq_offset->like(block_tables).shaped({sequences});
           require(value.size(0) == key.size(0), "value",
                   std::to_string(value.size(0)) + " rows, but key has " + std::to_string(key.size(0)));
           const Gather call{key_cache,
                             value_cache,
                             block_tables,
                             seq_lens,
                             key,
                             value,
                             seq_offset,
                             paged_cache(key_cache, key, fractal),
                             paged_cache(value_cache, value, fractal),
                             is_seq_lens_cumsum};
           require(call.keys.blocks == call.values.blocks && call.keys.block_size == call.values.block_size,
                   "value_cache",
                   "shape " + shape_text(value_cache.sizes()) + " does not go with key_cache " +
                       shape_text(key_cache.sizes()));
           const int64_t rows = bytes_of(key) + bytes_of(value);
           costs({rows + bytes_of(block_tables) + bytes_of(seq_lens), rows});
           return [call] { gather(call); };
         })

// One step of decoding without the host: the sampled token becomes the input, positions and lengths grow by one
// and the slots follow from the block tables. Queries beyond `num_queries` are padding and stay as they are.
OPERATOR(aclnnAdvanceStep,
         (Out input_tokens, In sampled_token_ids, Out input_positions, Out seq_lens, Out slot_mapping,
          In block_tables, int64_t num_seqs, int64_t num_queries, int64_t block_size),
         {
           require(
               num_queries > 0 && num_seqs > num_queries, "num_seqs",
               std::to_string(num_seqs) + " must be greater than num_queries " + std::to_string(num_queries));
           require(block_size > 0, "block_size", "must be greater than 0");
           for (const In& tensor : {In(input_tokens), In(input_positions), In(seq_lens), In(slot_mapping)}) {
             tensor.in({at::kLong}).shaped({num_seqs});
           }
           sampled_token_ids.in({at::kLong}).shaped({num_queries, 1});
           block_tables.in({at::kLong}).rank(2, 2);
           require(
               block_tables.size(0) == num_seqs, "block_tables",
               std::to_string(block_tables.size(0)) + " rows for " + std::to_string(num_seqs) + " sequences");
           return [=] {
             const auto front = [&](const Out& tensor) { return tensor.narrow(0, 0, num_queries); };
             const at::Tensor position = front(seq_lens).clone();  // where the new token goes
             const at::Tensor column = position.div(block_size, "floor");
             require(column.max().item<int64_t>() < block_tables.size(1), "block_tables",
                     "a sequence grows beyond its " + std::to_string(block_tables.size(1)) + " blocks");
             const at::Tensor block =
                 block_tables.narrow(0, 0, num_queries).gather(1, column.unsqueeze(1)).squeeze(1);
             front(input_tokens).copy_(sampled_token_ids.squeeze(1));
             front(input_positions).copy_(position);
             front(seq_lens).copy_(position + 1);
             front(slot_mapping).copy_(block * block_size + position.remainder(block_size));
           };
         })

}  // namespace ascend_sim
