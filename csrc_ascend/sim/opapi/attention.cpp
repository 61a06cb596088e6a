// The reference computation of attention, and the rules of masks that the operators share.
#include "sim/opapi/attention.h"

#include <limits>

#include "sim/opapi/aten.h"

namespace ascend_sim {
namespace {

// Rows of one sequence as (heads, rows, dim).
at::Tensor rows_of(const at::Tensor& tensor, Axes axes, int64_t sequence, const Span& span, int64_t heads) {
  const auto split = [&](const at::Tensor& rows) {
    return rows.reshape({span.length, heads, rows.numel() / std::max<int64_t>(1, span.length * heads)});
  };
  switch (axes) {
    case Axes::TND:
      return tensor.narrow(0, span.start, span.length).transpose(0, 1);
    case Axes::NTD:
      return tensor.narrow(1, span.start, span.length);
    case Axes::BSH:
      return split(tensor.select(0, sequence).narrow(0, 0, span.length)).transpose(0, 1);
    case Axes::SBH:
      return split(tensor.select(1, sequence).narrow(0, 0, span.length)).transpose(0, 1);
    case Axes::BSND:
      return tensor.select(0, sequence).narrow(0, 0, span.length).transpose(0, 1);
    case Axes::BNSD:
      return tensor.select(0, sequence).narrow(1, 0, span.length);
    case Axes::NBSD:
      return tensor.select(1, sequence).narrow(1, 0, span.length);
  }
  return {};
}

// Writes (heads, rows, dim) to where `rows_of` reads.
void put_rows(const at::Tensor& tensor, Axes axes, int64_t sequence, const Span& span, const at::Tensor& rows) {
  if (axes == Axes::BSH || axes == Axes::SBH) {
    const at::Tensor flat = rows.transpose(0, 1).reshape({span.length, -1});
    tensor.select(axes == Axes::BSH ? 0 : 1, sequence).narrow(0, 0, span.length).copy_(flat);
    return;
  }
  rows_of(tensor, axes, sequence, span, rows.size(0)).copy_(rows);
}

at::Tensor key_rows(const AttentionCall& call, const In& tensor, int64_t sequence, const Span& span,
                    const KvScales& scales = {}, const Maybe& prefix = {}) {
  if (!call.paged()) {
    const Span own{span.start, span.length - call.prefix_rows};
    at::Tensor rows = rows_of(tensor, call.axes, sequence, own, call.kv_heads);
    if (prefix) rows = at::cat({rows_of(*prefix, call.axes, 0, {0, call.prefix_rows}, call.kv_heads), rows}, 1);
    return scales.scale ? dequantised(call, scales, rows, {}) : rows;
  }
  const CacheShape shape = cache_shape(tensor, call.kv_heads);
  const int64_t count = blocks_for(span.length, shape.block_size);
  const int32_t* row = call.block_table->const_data_ptr<int32_t>() + sequence * call.block_table->size(1);
  const std::vector<int64_t> ids(row, row + count);
  for (const int64_t id : ids) {
    require(id >= 0 && id < shape.blocks, "block_table",
            "block " + std::to_string(id) + " of sequence " + std::to_string(sequence) + " is not one of the " +
                std::to_string(shape.blocks) + " blocks of the cache");
  }
  const at::Tensor rows = cached_rows(tensor, shape, ids, span.length);
  return scales.scale ? dequantised(call, scales, rows, ids) : rows;
}

// The full mask of one sequence, (1 or heads, rows, keys).
at::Tensor given_mask(const AttentionCall& call, int64_t sequence, int64_t rows, int64_t keys) {
  at::Tensor mask = *call.mask;
  // A single query row per sequence: (B, keys) and (B, 1, keys) have the batch in front.
  const bool one_row = call.query_rows == 1 && !call.packed();
  if (mask.dim() == 2) mask = one_row && call.batch == mask.size(0) ? mask.unsqueeze(1) : mask.unsqueeze(0);
  if (mask.dim() == 3) mask = mask.unsqueeze(1);
  mask = mask.select(0, mask.size(0) == 1 ? 0 : sequence);
  return mask.narrow(1, 0, rows).narrow(2, 0, keys).to(at::kBool);
}

// The mask of keys that are not visible to query rows, (1 or heads, rows, keys); undefined if all are.
at::Tensor forbidden(const AttentionCall& call, int64_t sequence, int64_t rows, int64_t keys) {
  if (!call.mask) return {};
  if (call.sparse_mode == 1) return given_mask(call, sequence, rows, keys);
  const at::Tensor row = at::arange(rows).unsqueeze(1), key = at::arange(keys).unsqueeze(0);
  const int64_t right = keys - rows;  // the last row sees the last key
  switch (call.sparse_mode) {
    case 2:
      return key.gt(row).unsqueeze(0);
    case 3:
      return key.gt(row + right).unsqueeze(0);
    case 4:
      return key.gt(row + right + call.next).logical_or(key.lt(row + right - call.pre)).unsqueeze(0);
    default:
      return key.gt(row + call.next)
          .logical_or(key.lt(row - call.pre))
          .unsqueeze(0)
          .logical_or(given_mask(call, sequence, rows, keys));
  }
}

// The positional bias of one sequence, (heads, rows or 1, keys).
at::Tensor bias(const AttentionCall& call, int64_t sequence, int64_t rows, int64_t keys) {
  const at::Tensor own = call.pse->select(0, call.pse->size(0) == 1 ? 0 : sequence);
  return own.narrow(1, 0, own.size(1) == 1 ? 1 : rows).narrow(2, 0, keys).to(at::kFloat);
}

// Scaled scores of one sequence, (heads, rows, keys). `fast`: as the high-performance kernels have them, in
// float16 from the product on, so that a product beyond 65504 is infinite.
at::Tensor scores(const AttentionCall& call, int64_t sequence, const at::Tensor& query, const at::Tensor& key,
                  bool fast) {
  const int64_t group = call.heads / call.kv_heads, rows = query.size(1), keys = key.size(1);
  const at::Tensor grouped = query.reshape({call.kv_heads, group * rows, query.size(2)});
  at::Tensor product = at::matmul(grouped, key.transpose(1, 2)).reshape({call.heads, rows, keys});
  if (fast) product = product.to(at::kHalf).to(at::kFloat);
  if (call.pse && call.scale_bias) product = product + bias(call, sequence, rows, keys);
  product = product * call.scale;
  if (call.pse && !call.scale_bias) product = product + bias(call, sequence, rows, keys);
  return fast ? product.to(at::kHalf).to(at::kFloat) : product;
}

struct Softmax {
  at::Tensor weights, max, sum;  // (heads, rows, keys) not yet divided by the sum; (heads, rows, 1)
};

Softmax softmax(const AttentionCall& call, const at::Tensor& score, bool fast) {
  at::Tensor max = score.amax(-1, true);
  if (call.sink) max = at::maximum(max, call.sink->to(at::kFloat).view({call.heads, 1, 1}));
  at::Tensor weights = at::exp(score - max);
  if (fast) weights = weights.to(at::kHalf).to(at::kFloat);
  at::Tensor sum = weights.sum(-1, true);
  if (call.sink) sum = sum + at::exp(call.sink->to(at::kFloat).view({call.heads, 1, 1}) - max);
  return {weights, max, fast ? sum.to(at::kHalf).to(at::kFloat) : sum};
}

// A large negative number instead of minus infinity: without the correction of rows that see nothing, the chip
// gives such a row the mean of all values.
constexpr float kMasked = -3.0e38F;

struct Attended {
  at::Tensor out, lse, max, sum;  // (heads, rows, dim), then (heads, rows, 1)
};

Attended attend_sequence(const AttentionCall& call, int64_t sequence, const Span& own, const Span& seen) {
  const auto joined = [](const at::Tensor& first, const at::Tensor& rope) {
    return (rope.defined() ? at::cat({first, rope}, -1) : first).to(at::kFloat);
  };
  at::Tensor query_rope, key_rope;
  if (call.has_rope()) {
    query_rope = rows_of(*call.query_rope, call.axes, sequence, own, call.heads);
    key_rope = key_rows(call, *call.key_rope, sequence, seen);
  }
  const at::Tensor query = joined(rows_of(call.query, call.axes, sequence, own, call.heads), query_rope);
  const at::Tensor key =
      joined(key_rows(call, call.key, sequence, seen, call.key_scales, call.key_prefix), key_rope);
  const at::Tensor value =
      key_rows(call, call.value, sequence, seen, call.value_scales, call.value_prefix).to(at::kFloat);

  // bfloat16 has no high-performance mode, and a positional bias forces the high-precision one.
  const bool fast = call.query.scalar_type() == at::kHalf && (call.inner_precise & 1) && !call.pse;
  at::Tensor score = scores(call, sequence, query, key, fast);
  const at::Tensor hidden = forbidden(call, sequence, own.length, seen.length);
  if (hidden.defined()) score = score.masked_fill(hidden, kMasked);
  const Softmax soft = softmax(call, score, fast);

  const int64_t group = call.heads / call.kv_heads;
  const at::Tensor grouped = soft.weights.reshape({call.kv_heads, group * own.length, seen.length});
  at::Tensor out = at::matmul(grouped, value).reshape({call.heads, own.length, value.size(2)}) / soft.sum;
  at::Tensor lse = soft.max + at::log(soft.sum);
  // The operators find such rows themselves where the mask is made of lengths.
  const bool corrects = (call.inner_precise & 2) || call.sparse_mode >= 2;
  if (hidden.defined() && corrects) {
    const at::Tensor blind = hidden.all(-1, true).expand({call.heads, own.length, 1});
    out = out.masked_fill(blind, 0.0);
    lse = lse.masked_fill(blind, std::numeric_limits<float>::infinity());
  }
  return {out, lse, soft.max, soft.sum};
}

// Statistics of all rows, gathered before they are written.
struct Statistics {
  at::Tensor lse, max, sum;  // in the shape that `put_statistics` fills

  explicit Statistics(const AttentionCall& call) {
    const auto filled = [&](float value) {
      const int64_t rows = call.packed() ? call.query.size(call.axes == Axes::TND ? 0 : 1) : call.query_rows;
      if (call.packed()) return at::full({call.heads, rows, 1}, value, at::kFloat);
      return at::full({call.batch, call.heads, rows, 1}, value, at::kFloat);
    };
    lse = filled(std::numeric_limits<float>::infinity());
    max = filled(-std::numeric_limits<float>::infinity());
    sum = filled(0.0F);
  }
};

void put_statistics(const AttentionCall& call, const at::Tensor& all, int64_t sequence, const Span& own,
                    const at::Tensor& rows) {
  const at::Tensor place =
      call.packed() ? all.narrow(1, own.start, own.length) : all.select(0, sequence).narrow(1, 0, own.length);
  place.copy_(rows);
}

// The compressed mask is a triangle: zeros on and below the diagonal, ones above. Edges and diagonals tell.
void require_triangle(const In& mask) {
  const at::Tensor square = mask.view({2048, 2048});
  const bool zeros = !square.diagonal().any().item<bool>() && !square.select(1, 0).any().item<bool>() &&
                     !square.select(0, 2047).any().item<bool>();
  const bool ones = square.diagonal(1).all().item<bool>() &&
                    square.select(0, 0).narrow(0, 1, 2047).all().item<bool>() &&
                    square.select(1, 2047).narrow(0, 0, 2047).all().item<bool>();
  require(zeros && ones, mask.name,
          "the compressed mask must be zero on and below the diagonal and one above it (1 = not seen)");
}

}  // namespace

at::Tensor cached_rows(const In& cache, const CacheShape& shape, at::IntArrayRef ids, int64_t length) {
  const int64_t count = static_cast<int64_t>(ids.size());
  const at::Tensor blocks = cache.index_select(0, at::tensor(ids, at::kLong));
  const int64_t tokens = count * shape.block_size;
  at::Tensor rows;  // (heads, tokens, dim)
  if (cache.dim() == 3) {
    rows = blocks.reshape({tokens, shape.heads, shape.dim}).transpose(0, 1);
  } else if (cache.dim() == 4) {
    rows = blocks.transpose(0, 1).reshape({shape.heads, tokens, shape.dim});
  } else {  // (blocks, heads, dim / lane, block size, lane)
    rows = blocks.permute({1, 0, 3, 2, 4}).reshape({shape.heads, tokens, shape.dim});
  }
  return rows.narrow(1, 0, length);
}

void attend(const AttentionCall& call) {
  if (call.mask && call.sparse_mode >= 2) require_triangle(*call.mask);
  const at::Tensor out = at::zeros(call.out.sizes(), at::kFloat);
  const Statistics statistics(call);
  for (int64_t i = 0; i < call.batch; ++i) {
    const Span& own = call.query_spans[i];
    const Span& seen = call.kv_spans[i];
    if (own.length == 0 || seen.length == 0) continue;
    const Attended result = attend_sequence(call, i, own, seen);
    put_rows(out, call.out_axes, i, own, result.out);
    put_statistics(call, statistics.lse, i, own, result.lse);
    put_statistics(call, statistics.max, i, own, result.max);
    put_statistics(call, statistics.sum, i, own, result.sum);
  }
  call.out.set(out);
  if (call.wants_lse) call.lse->set(call.packed() ? statistics.lse.transpose(0, 1) : statistics.lse);
  const auto set_eightfold = [](const MaybeOut& place, const at::Tensor& values) {
    if (place) place->set(values.repeat_interleave(8, -1).reshape(place->sizes()));
  };
  set_eightfold(call.row_max, statistics.max);
  set_eightfold(call.row_sum, statistics.sum);
}

}  // namespace ascend_sim
