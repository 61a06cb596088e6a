// Layouts, lengths and block tables of attention calls.
#include <algorithm>
#include <map>
#include <tuple>

#include "sim/opapi/attention.h"

namespace ascend_sim {
namespace {

struct Layout {
  Axes in, out;
};

const std::map<std::string, Layout>& layouts() {
  static const std::map<std::string, Layout> table = {
      {"TND", {Axes::TND, Axes::TND}},         {"NTD", {Axes::NTD, Axes::NTD}},
      {"BSH", {Axes::BSH, Axes::BSH}},         {"BSND", {Axes::BSND, Axes::BSND}},
      {"BNSD", {Axes::BNSD, Axes::BNSD}},      {"SBH", {Axes::SBH, Axes::SBH}},
      {"BNSD_BSND", {Axes::BNSD, Axes::BSND}}, {"BSH_BNSD", {Axes::BSH, Axes::BNSD}},
      {"BSND_BNSD", {Axes::BSND, Axes::BNSD}}, {"NTD_TND", {Axes::NTD, Axes::TND}},
      {"TND_NTD", {Axes::TND, Axes::NTD}},     {"BSH_NBSD", {Axes::BSH, Axes::NBSD}},
      {"BSND_NBSD", {Axes::BSND, Axes::NBSD}}, {"BNSD_NBSD", {Axes::BNSD, Axes::NBSD}},
  };
  return table;
}

// Sizes of a tensor's axes; tokens stands for T or S.
struct Extent {
  int64_t batch, tokens, heads, dim;
};

Extent extent_of(const In& tensor, Axes axes, int64_t heads) {
  const bool flat = axes == Axes::BSH || axes == Axes::SBH;
  const bool packed = axes == Axes::TND || axes == Axes::NTD;
  tensor.rank(flat || packed ? 3 : 4, flat || packed ? 3 : 4);
  const auto size = [&](int64_t d) { return tensor.size(d); };
  if (flat) {
    require(size(2) % heads == 0, tensor.name,
            "the last axis of " + shape_text(tensor.sizes()) + " is no multiple of " + std::to_string(heads) +
                " heads");
  }
  switch (axes) {
    case Axes::TND:
      return {1, size(0), size(1), size(2)};
    case Axes::NTD:
      return {1, size(1), size(0), size(2)};
    case Axes::BSH:
      return {size(0), size(1), heads, size(2) / heads};
    case Axes::SBH:
      return {size(1), size(0), heads, size(2) / heads};
    case Axes::BSND:
      return {size(0), size(1), size(2), size(3)};
    case Axes::BNSD:
      return {size(0), size(2), size(1), size(3)};
    case Axes::NBSD:
      return {size(1), size(2), size(0), size(3)};
  }
  return {};
}

std::vector<int64_t> shape_of(Axes axes, const Extent& e) {
  switch (axes) {
    case Axes::TND:
      return {e.tokens, e.heads, e.dim};
    case Axes::NTD:
      return {e.heads, e.tokens, e.dim};
    case Axes::BSH:
      return {e.batch, e.tokens, e.heads * e.dim};
    case Axes::SBH:
      return {e.tokens, e.batch, e.heads * e.dim};
    case Axes::BSND:
      return {e.batch, e.tokens, e.heads, e.dim};
    case Axes::BNSD:
      return {e.batch, e.heads, e.tokens, e.dim};
    case Axes::NBSD:
      return {e.heads, e.batch, e.tokens, e.dim};
  }
  return {};
}

std::string entry(const std::string& name, size_t i) { return name + "[" + std::to_string(i) + "]"; }

// Ends of sequences one after another to the sequences themselves.
std::vector<Span> from_ends(const Ints& ends, int64_t tokens, const std::string& name, const std::string& of) {
  std::vector<Span> spans;
  int64_t start = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    require(ends[i] >= start, name,
            entry(name, i) + " is " + std::to_string(ends[i]) + ", less than " + std::to_string(start) +
                " before it: the lengths here are cumulative, not those of single sequences");
    spans.push_back({start, ends[i] - start});
    start = ends[i];
  }
  require(start == tokens, name,
          "the last cumulative length is " + std::to_string(start) + " but " + of + " has " +
              std::to_string(tokens) + " tokens");
  return spans;
}

// Lengths of single sequences. One length counts for all; of a list that is too long the front counts.
std::vector<Span> from_lengths(const MaybeInts& lengths, int64_t batch, int64_t rows, const std::string& name) {
  std::vector<Span> spans(static_cast<size_t>(batch), Span{0, rows});
  if (!lengths) return spans;
  const Ints& given = *lengths;
  require(given.size() == 1 || given.size() >= spans.size(), name,
          std::to_string(given.size()) + " lengths for " + std::to_string(batch) + " sequences");
  for (size_t i = 0; i < spans.size(); ++i) {
    const int64_t length = given[given.size() == 1 ? 0 : i];
    require(length >= 0 && length <= rows, name,
            entry(name, i) + " is " + std::to_string(length) + ", outside [0, " + std::to_string(rows) + "]");
    spans[i].length = length;
  }
  return spans;
}

void resolve_heads(AttentionCall& call) {
  const AttentionNames& names = call.names;
  require(call.heads > 0, names.heads, "must be greater than 0, is " + std::to_string(call.heads));
  require(call.kv_heads >= 0, names.kv_heads, "must not be negative, is " + std::to_string(call.kv_heads));
  if (call.kv_heads == 0) call.kv_heads = call.heads;
  require(call.heads % call.kv_heads == 0, names.kv_heads,
          std::to_string(call.kv_heads) + " does not divide " + std::to_string(call.heads) + " query heads");
}

void resolve_table(AttentionCall& call) {
  const In& table = *call.block_table;
  table.in({at::kInt}).rank(2, 2).dense();
  require(call.block_size > 0, "block_size", "must be given with a block table");
  require(call.kv_lengths.has_value(), call.names.kv_lengths, "must be given with a block table");
  require(table.size(0) == call.batch, table.name,
          std::to_string(table.size(0)) + " rows for " + std::to_string(call.batch) + " sequences");
  call.kv_rows = table.size(1) * call.block_size;
}

void resolve_cache(AttentionCall& call) {
  const CacheShape key = cache_shape(call.key, call.kv_heads), value = cache_shape(call.value, call.kv_heads);
  require(call.key.dim() == call.value.dim() && key.blocks == value.blocks &&
              key.block_size == value.block_size && key.heads == value.heads,
          call.value.name,
          "shape " + shape_text(call.value.sizes()) + " does not go with key " + shape_text(call.key.sizes()));
  require(key.heads == call.kv_heads, call.key.name,
          "the cache " + shape_text(call.key.sizes()) + " has not " + std::to_string(call.kv_heads) + " heads");
  require(key.block_size == call.block_size, "block_size",
          std::to_string(call.block_size) + " is not that of the cache " + shape_text(call.key.sizes()));
  require(key.dim == call.query_dim, call.key.name,
          "head size " + std::to_string(key.dim) + " of the cache is not the query's " +
              std::to_string(call.query_dim));
  call.value_dim = value.dim;
  resolve_table(call);
}

void resolve_contiguous(AttentionCall& call) {
  const Extent key = extent_of(call.key, call.axes, call.kv_heads);
  const Extent value = extent_of(call.value, call.axes, call.kv_heads);
  for (const auto& [tensor, extent] : {std::pair(&call.key, key), std::pair(&call.value, value)}) {
    require(extent.heads == call.kv_heads, call.names.kv_heads,
            std::to_string(call.kv_heads) + " is not the number of heads of " + tensor->name + " " +
                shape_text(tensor->sizes()));
    require(call.packed() || extent.batch == call.batch, tensor->name,
            "batch " + std::to_string(extent.batch) + " is not the query's " + std::to_string(call.batch));
  }
  require(value.tokens == key.tokens, call.value.name,
          std::to_string(value.tokens) + " tokens, but key has " + std::to_string(key.tokens));
  require(key.dim == call.query_dim, call.key.name,
          "head size " + std::to_string(key.dim) + " is not the query's " + std::to_string(call.query_dim));
  call.kv_rows = key.tokens;
  call.value_dim = value.dim;
}

void resolve_packed_lengths(AttentionCall& call, int64_t query_tokens) {
  const AttentionNames& names = call.names;
  require(call.query_lengths.has_value(), names.query_lengths, "must be given in the layout " + call.layout);
  require(call.kv_lengths.has_value(), names.kv_lengths, "must be given in the layout " + call.layout);
  call.batch = static_cast<int64_t>(call.query_lengths->size());
  require(call.kv_lengths->size() == call.query_lengths->size(), names.kv_lengths,
          std::to_string(call.kv_lengths->size()) + " lengths, but " + names.query_lengths + " has " +
              std::to_string(call.batch));
  call.query_spans = from_ends(*call.query_lengths, query_tokens, names.query_lengths, call.query.name);
  for (const Span& span : call.query_spans) call.query_rows = std::max(call.query_rows, span.length);
}

// With a block table each sequence has its own length; a list that grows beyond the table is a cumulative one.
void resolve_paged_lengths(AttentionCall& call) {
  const Ints& lengths = *call.kv_lengths;
  const std::string& name = call.names.kv_lengths;
  for (size_t i = 0; i < lengths.size(); ++i) {
    require(lengths[i] >= 0 && lengths[i] <= call.kv_rows, name,
            entry(name, i) + " is " + std::to_string(lengths[i]) + ", but the block table has room for " +
                std::to_string(call.kv_rows) +
                " tokens of each sequence (with a block table the lengths are not cumulative)");
  }
  call.kv_spans = from_lengths(call.kv_lengths, call.batch, call.kv_rows, name);
}

// The prefix counts in the lengths of keys, and so in masks and biases.
void resolve_prefix(AttentionCall& call) {
  if (!call.key_prefix && !call.value_prefix) return;
  require(call.key_prefix.has_value(), "key_shared_prefix", "must be given together with value_shared_prefix");
  require(call.value_prefix.has_value(), "value_shared_prefix",
          "must be given together with key_shared_prefix");
  const In& key = *call.key_prefix;
  const In& value = *call.value_prefix;
  require(!call.packed(), key.name, "is not supported in the layout " + call.layout);
  require(!call.paged(), key.name, "does not go with a block table");
  require(!call.has_rope(), key.name, "does not go with query_rope");
  for (const auto& [prefix, own, dim] :
       {std::tuple(&key, &call.key, call.query_dim), std::tuple(&value, &call.value, call.value_dim)}) {
    prefix->like(*own).dense();
    const Extent extent = extent_of(*prefix, call.axes, call.kv_heads);
    require(extent.batch == 1 && extent.heads == call.kv_heads && extent.dim == dim, prefix->name,
            "shape " + shape_text(prefix->sizes()) + " does not go with " + own->name + " " +
                shape_text(own->sizes()) + " and a batch of 1");
  }
  const int64_t rows = extent_of(key, call.axes, call.kv_heads).tokens;
  require(
      extent_of(value, call.axes, call.kv_heads).tokens == rows, value.name,
      "shape " + shape_text(value.sizes()) + " has not the " + std::to_string(rows) + " tokens of " + key.name);
  call.prefix_rows = rows;
  if (call.prefix_length) {
    const Ints& lengths = *call.prefix_length;
    require(lengths.size() == 1, "actual_shared_prefix_len",
            std::to_string(lengths.size()) + " lengths for one prefix");
    require(lengths[0] >= 0 && lengths[0] <= rows, "actual_shared_prefix_len",
            std::to_string(lengths[0]) + " is outside [0, " + std::to_string(rows) + "]");
    call.prefix_rows = lengths[0];
  }
  call.kv_rows += call.prefix_rows;
  const int64_t most = call.query_rows == 1 ? 262144 : 20971520;
  require(call.kv_rows <= most, key.name,
          std::to_string(call.kv_rows) + " tokens with those of key exceed " + std::to_string(most));
  for (Span& span : call.kv_spans) span.length += call.prefix_rows;
}

void resolve_rope(const AttentionCall& call) {
  if (!call.query_rope && !call.key_rope) return;
  require(call.query_rope.has_value(), "query_rope", "must be given together with key_rope");
  require(call.key_rope.has_value(), "key_rope", "must be given together with query_rope");
  call.query_rope->like(call.query).dense();
  call.key_rope->like(call.key).dense();
  Extent query = extent_of(call.query, call.axes, call.heads);
  query.dim = 64;
  call.query_rope->shaped(shape_of(call.axes, query));
  if (call.paged()) {
    CacheShape key = cache_shape(call.key, call.kv_heads), rope = cache_shape(*call.key_rope, call.kv_heads);
    require(call.key_rope->dim() == call.key.dim() && rope.blocks == key.blocks && rope.heads == key.heads &&
                rope.block_size == key.block_size && rope.dim == 64,
            "key_rope",
            "shape " + shape_text(call.key_rope->sizes()) + " does not go with key " +
                shape_text(call.key.sizes()) + " and a head size of 64");
  } else {
    Extent key = extent_of(call.key, call.axes, call.kv_heads);
    key.dim = 64;
    call.key_rope->shaped(shape_of(call.axes, key));
  }
}

void resolve_outputs(AttentionCall& call, Extent extent) {
  extent.dim = call.value_dim;
  call.out.like(call.query).shaped(shape_of(call.out_axes, extent));
  if (!call.wants_lse) return;
  require(call.lse.has_value(), call.names.lse, "must be given when it is asked for");
  call.lse->in({at::kFloat});
  if (call.packed()) {
    call.lse->shaped({extent.tokens, call.heads, 1});
  } else {
    call.lse->shaped({extent.batch, call.heads, extent.tokens, 1});
  }
}

// Keys and values of the sequences once, of whatever cache, and of the prefix once for all; a value that is the
// key (latent attention) is not read again.
Cost cost_of(const AttentionCall& call) {
  const int64_t width = call.query_dim + (call.value.data_ptr() == call.key.data_ptr() ? 0 : call.value_dim);
  const int64_t scale_bytes = call.key_scales.mode == kPagedPerTokenHead ? 2 * sizeof(float) : 0;
  int64_t of_a_key = call.kv_heads * (width * static_cast<int64_t>(call.key.element_size()) + scale_bytes);
  int64_t read = bytes_of(call.query);
  if (call.has_rope()) {
    of_a_key += call.kv_heads * call.key_rope->size(-1) * static_cast<int64_t>(call.key_rope->element_size());
    read += bytes_of(*call.query_rope);
  }
  read += call.prefix_rows * of_a_key;
  for (const Span& span : call.kv_spans) read += (span.length - call.prefix_rows) * of_a_key;
  for (const Maybe* other : {&call.mask, &call.pse, &call.block_table}) {
    if (*other) read += bytes_of(**other);
  }
  return {read, bytes_of(call.out) + (call.wants_lse ? bytes_of(*call.lse) : 0)};
}

}  // namespace

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

CacheShape cache_shape(const In& cache, int64_t heads) {
  cache.rank(3, 5);
  if (cache.dim() == 3) {
    require(cache.size(2) % heads == 0, cache.name,
            "the last axis of " + shape_text(cache.sizes()) + " is no multiple of " + std::to_string(heads) +
                " heads");
    return {cache.size(0), cache.size(1), heads, cache.size(2) / heads};
  }
  if (cache.dim() == 4) return {cache.size(0), cache.size(2), cache.size(1), cache.size(3)};
  const int64_t lane = 32 / cache.element_size();
  require(
      cache.size(4) == lane, cache.name,
      "the last axis of the fractal cache " + shape_text(cache.sizes()) + " must be " + std::to_string(lane));
  return {cache.size(0), cache.size(3), cache.size(1), cache.size(2) * cache.size(4)};
}

void resolve(AttentionCall& call) {
  const auto found = layouts().find(call.layout);
  require(found != layouts().end(), "input_layout", "\"" + call.layout + "\" is not known");
  call.axes = found->second.in;
  call.out_axes = found->second.out;
  resolve_heads(call);
  const Extent query = extent_of(call.query, call.axes, call.heads);
  require(
      query.heads == call.heads, call.names.heads,
      std::to_string(call.heads) + " is not the number of heads of query " + shape_text(call.query.sizes()));
  call.query_dim = query.dim;
  call.batch = query.batch;
  call.query_rows = call.packed() ? 0 : query.tokens;
  if (call.packed()) resolve_packed_lengths(call, query.tokens);
  if (call.paged()) {
    resolve_cache(call);
    resolve_paged_lengths(call);
  } else {
    resolve_contiguous(call);
    call.kv_spans = call.packed()
                        ? from_ends(*call.kv_lengths, call.kv_rows, call.names.kv_lengths, call.key.name)
                        : from_lengths(call.kv_lengths, call.batch, call.kv_rows, call.names.kv_lengths);
  }
  if (!call.packed()) {
    call.query_spans = from_lengths(call.query_lengths, call.batch, call.query_rows, call.names.query_lengths);
  }
  resolve_prefix(call);
  resolve_rope(call);
  resolve_outputs(call, query);
  costs(cost_of(call));
}

}  // namespace ascend_sim
