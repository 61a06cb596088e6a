// Rotary position embeddings, alone and with the norm and cache of latent attention.
#include "sim/opapi/aten.h"
#include "sim/opapi/table.h"

namespace ascend_sim {
namespace {

Dtypes chip_floats() { return soc() == Soc::P310 ? Dtypes{at::kFloat, at::kHalf} : kFloats; }

// (x1, x2) to (-x2, x1), of the halves or of neighbours.
at::Tensor turned_halves(const at::Tensor& x) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  return at::cat({-halves[1], halves[0]}, -1);
}
at::Tensor turned_neighbours(const at::Tensor& x) {
  return at::stack({-x.slice(-1, 1, std::nullopt, 2), x.slice(-1, 0, std::nullopt, 2)}, -1).flatten(-2);
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool neighbours) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor turned = neighbours ? turned_neighbours(wide) : turned_halves(wide);
  return wide * cos.to(at::kFloat) + turned * sin.to(at::kFloat);
}

// Neighbours are moved into halves first; the result stays so.
at::Tensor rotated_apart(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const at::Tensor apart = at::cat({x.slice(-1, 0, std::nullopt, 2), x.slice(-1, 1, std::nullopt, 2)}, -1);
  return rotated(apart, cos, sin, false);
}

bool spreads(at::IntArrayRef from, at::IntArrayRef to) {
  if (from.size() != to.size()) return false;
  for (size_t d = 0; d < from.size(); ++d) {
    if (from[d] != to[d] && from[d] != 1) return false;
  }
  return true;
}

}  // namespace

OPERATOR(aclnnRotaryPositionEmbedding, (In x, In cos, In sin, int64_t mode, Out out), {
  require(soc() != Soc::P310, "x", "the operator does not exist on Ascend310P");
  x.in(kFloats).rank(3, 4);
  require(mode == 0 || mode == 1, "mode", std::to_string(mode) + " is neither 0 (half) nor 1 (interleave)");
  const int64_t dim = x.size(-1);
  require(dim < 896 && dim % 2 == 0, "x", "head size " + std::to_string(dim) + " must be even and below 896");
  cos.like(x);
  require(spreads(cos.sizes(), x.sizes()) && cos.size(-1) == dim, "cos",
          "its axes must be those of x or 1, the last one " + std::to_string(dim));
  sin.like(x).shaped(cos.sizes());
  out.like(x).shaped(x.sizes());
  return [=] { out.set(rotated(x, cos, sin, mode == 1)); };
})

// Layouts: 1 is (batch, rows, heads, dim), 4 is (tokens, heads, dim); 2 and 3 are not for these chips. Before
// CANN 9.0 the operator takes the first alone, with heads of 128.
OPERATOR(aclnnApplyRotaryPosEmbV2, (Out query, Out key, In cos, In sin, int64_t layout, Text rotary_mode), {
  query.in(chip_floats());
  const bool old = cann() < 900;
  require(
      layout == 1 || (layout == 4 && !old), "layout",
      std::to_string(layout) + (old ? " is not supported (1 BSND)" : " is not supported (1 BSND or 4 TND)"));
  require(rotary_mode == "half", "rotary_mode", "\"" + rotary_mode + "\" is not supported (half)");
  const int64_t axes = layout == 1 ? 4 : 3;
  query.rank(axes, axes);
  key.like(query).rank(axes, axes);
  const int64_t dim = query.size(-1);
  require((dim == 64 && !old) || dim == 128, "query",
          "head size " + std::to_string(dim) + (old ? " must be 128" : " must be 64 or 128"));
  std::vector<int64_t> wanted = query.sizes().vec();
  wanted[axes - 2] = key.size(axes - 2);
  key.shaped(wanted);
  wanted[axes - 2] = 1;
  cos.like(query).shaped(wanted);
  sin.like(query).shaped(wanted);
  also_reads(bytes_of(query) + bytes_of(key));
  return [=] {
    query.set(rotated(query, cos, sin, false));
    key.set(rotated(key, cos, sin, false));
  };
})

namespace {

// For each rotated pair, which of the three positions (time, height, width) turns it.
at::Tensor axis_of_pair(const Ints& section, int64_t pairs, bool interleaved) {
  at::Tensor axis = at::zeros({pairs}, at::kLong);
  if (!interleaved) {
    axis.narrow(0, section[0], section[1]).fill_(1);
    axis.narrow(0, section[0] + section[1], section[2]).fill_(2);
    return axis;
  }
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t which = i % 3;
    if (which != 0 && i < 3 * section[which]) axis[i] = which;
  }
  return axis;
}

struct Multimodal {
  In positions, query, key, cache;
  Ints section;
  int64_t head_size;
  bool neox, interleaved;
};

// cos and sin of every token, (tokens, 1, pairs).
std::pair<at::Tensor, at::Tensor> angles(const Multimodal& call) {
  const at::Tensor positions = call.positions.to(at::kLong);
  if (positions.numel() > 0) {
    const int64_t low = positions.min().item<int64_t>(), high = positions.max().item<int64_t>();
    require(low >= 0 && high < call.cache.size(0), "positions",
            "position " + std::to_string(low < 0 ? low : high) + " is outside the table of " +
                std::to_string(call.cache.size(0)));
  }
  at::Tensor rows = call.cache.to(at::kFloat).index({positions});  // (..., tokens, 2 * pairs)
  const int64_t pairs = call.cache.size(1) / 2;
  if (positions.dim() == 2) {
    const at::Tensor axis = axis_of_pair(call.section, pairs, call.interleaved).repeat({2});
    rows = rows.gather(0, axis.view({1, 1, 2 * pairs}).expand({1, rows.size(1), 2 * pairs})).squeeze(0);
  }
  const std::vector<at::Tensor> halves = rows.chunk(2, -1);
  return {halves[0].unsqueeze(1), halves[1].unsqueeze(1)};
}

at::Tensor turned(const Multimodal& call, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t width = call.cache.size(1);
  const at::Tensor heads = x.to(at::kFloat).reshape({x.size(0), -1, call.head_size});
  const at::Tensor own = heads.narrow(-1, 0, width), rest = heads.narrow(-1, width, call.head_size - width);
  const auto full = [&](const at::Tensor& half) {
    return call.neox ? at::cat({half, half}, -1) : half.repeat_interleave(2, -1);
  };
  return at::cat({rotated(own, full(cos), full(sin), !call.neox), rest}, -1).reshape(x.sizes());
}

}  // namespace

OPERATOR(aclnnRopeWithSinCosCacheV2,
         (In positions, In query, In key, In cos_sin_cache, Ints mrope_section, int64_t head_size, bool is_neox,
          int64_t cache_mode, Out query_out, Out key_out),
         {
           require(soc() != Soc::P310, "query", "the operator does not exist on Ascend310P");
           positions.in(kIndices).rank(1, 2);
           query.in(kFloats).rank(2, 2);
           key.like(query).rank(2, 2);
           cos_sin_cache.like(query).rank(2, 2);
           const int64_t tokens = query.size(0), width = cos_sin_cache.size(1);
           require(positions.size(-1) == tokens && (positions.dim() == 1 || positions.size(0) == 3),
                   "positions",
                   "its shape must be [" + std::to_string(tokens) + "] or [3, " + std::to_string(tokens) + "]");
           require(key.size(0) == tokens, "key",
                   std::to_string(key.size(0)) + " tokens, but query has " + std::to_string(tokens));
           require(head_size > 0 && query.size(1) % head_size == 0 && key.size(1) % head_size == 0, "head_size",
                   std::to_string(head_size) + " does not divide the widths of query and key");
           const int64_t unit = query.scalar_type() == at::kFloat ? 16 : 32;
           require(width % unit == 0 && width <= head_size, "cos_sin_cache",
                   "rotary size " + std::to_string(width) + " must be a multiple of " + std::to_string(unit) +
                       " and at most the head size " + std::to_string(head_size));
           require(cache_mode == 0 || cache_mode == 1, "cache_mode",
                   std::to_string(cache_mode) + " is not known");
           require(mrope_section.size() == 3, "mrope_section", "needs three numbers");
           if (positions.dim() == 2) {
             require(mrope_section[0] >= 0 && mrope_section[1] >= 0 && mrope_section[2] >= 0 &&
                         mrope_section[0] + mrope_section[1] + mrope_section[2] == width / 2,
                     "mrope_section", "its sum must be half of the rotary size, " + std::to_string(width / 2));
           }
           query_out.like(query).shaped(query.sizes());
           key_out.like(key).shaped(key.sizes());
           const Multimodal call{positions,     query,     key,     cos_sin_cache,
                                 mrope_section, head_size, is_neox, cache_mode == 1};
           const int64_t rotated_bytes = bytes_of(query) + bytes_of(key);
           const int64_t angle_bytes = positions.numel() * width * static_cast<int64_t>(query.element_size());
           costs({bytes_of(positions) + angle_bytes + rotated_bytes, rotated_bytes});
           return [=] {
             const auto [cos, sin] = angles(call);
             query_out.set(turned(call, query, cos, sin));
             key_out.set(turned(call, key, cos, sin));
           };
         })

OPERATOR(aclnnInterleaveRope, (In x, In cos, In sin, Out out), {
  require(soc() != Soc::P310, "x", "the operator does not exist on Ascend310P");
  x.in(kHalfs).rank(4, 4);
  require(x.size(3) == 64, "x", "head size " + std::to_string(x.size(3)) + " must be 64");
  cos.like(x).rank(4, 4);
  require(spreads(cos.sizes(), x.sizes()) && cos.size(0) == x.size(0) && cos.size(1) == 1 && cos.size(3) == 64,
          "cos", "its shape must be that of x with one head and, if wanted, one row");
  sin.like(x).shaped(cos.sizes());
  out.like(x).shaped(x.sizes());
  return [=] { out.set(rotated_apart(x, cos, sin)); };
})

namespace {

struct LatentCache {
  In kv, gamma, cos, sin, index;
  Out k_cache, ckv_cache;
  double epsilon;
  std::string mode;
  bool output;
  MaybeOut k_rope, c_kv;
};

bool is_paged(const LatentCache& call) { return call.mode != "Norm"; }

void check_latent(const LatentCache& call) {
  require(soc() != Soc::P310, "kv", "the operator does not exist on Ascend310P");
  const In& kv = call.kv.in(kHalfs).rank(4, 4);
  require(kv.size(1) == 1, "kv", std::to_string(kv.size(1)) + " heads must be 1");
  const int64_t batch = kv.size(0), rows = kv.size(2);
  call.gamma.like(kv).rank(1, 1);
  call.cos.like(kv).rank(4, 4);
  const int64_t value = call.gamma.size(0), rope = call.cos.size(3);
  require(kv.size(3) == 576, "kv", "its width " + std::to_string(kv.size(3)) + " must be 576 (512 and 64)");
  require(value == 512, "gamma", "its size " + std::to_string(value) + " must be 512");
  require(rope == 64, "cos", "head size " + std::to_string(rope) + " must be 64");
  require(
      call.cos.size(0) == batch && call.cos.size(1) == 1 && (call.cos.size(2) == rows || call.cos.size(2) == 1),
      "cos", "its shape must be [batch, 1, rows or 1, " + std::to_string(rope) + "]");
  call.sin.like(kv).shaped(call.cos.sizes());
  require(call.mode == "Norm" || call.mode == "PA" || call.mode == "PA_BNSD" || call.mode == "PA_NZ",
          "cache_mode", "\"" + call.mode + "\" is not simulated (Norm, PA, PA_BNSD, PA_NZ)");
  call.index.in({at::kLong});
  if (is_paged(call)) {
    call.index.shaped({batch * rows});
  } else {
    call.index.shaped({batch, rows});
  }
  for (const auto& [cache, dim] : {std::pair(&call.k_cache, rope), std::pair(&call.ckv_cache, value)}) {
    cache->like(kv).rank(4, 4).dense();
    const bool fits = is_paged(call) ? cache->size(2) == 1 : cache->size(0) == batch && cache->size(1) == 1;
    require(fits && cache->size(3) == dim, cache->name,
            "its shape must be " +
                std::string(is_paged(call) ? "[blocks, block size, 1, " : "[batch, 1, rows, ") +
                std::to_string(dim) + "]");
    require(!is_paged(call) || cache->size(1) % 16 == 0, cache->name,
            "block size " + std::to_string(cache->size(1)) + " must be a multiple of 16");
  }
  require(call.k_cache.sizes().slice(0, 3) == call.ckv_cache.sizes().slice(0, 3), "ckv_cache",
          "its shape does not go with k_cache");
}

// Places of the tokens in the flattened cache; -1 skips a token.
at::Tensor places(const LatentCache& call) {
  const at::Tensor index = call.index.flatten();
  const int64_t room = is_paged(call) ? call.k_cache.size(0) * call.k_cache.size(1) : call.k_cache.size(2);
  if (index.numel() > 0) {
    const int64_t low = index.min().item<int64_t>(), high = index.max().item<int64_t>();
    require(
        low >= -1 && high < room, "index",
        "place " + std::to_string(low < -1 ? low : high) + " is outside [-1, " + std::to_string(room) + ")");
  }
  const at::Tensor used = std::get<0>(index.masked_select(index.ge(0)).sort());
  if (is_paged(call)) {
    require(used.numel() < 2 || !used.slice(0, 1).eq(used.slice(0, 0, -1)).any().item<bool>(), "index",
            "a place is given more than once");
    return index;
  }
  const at::Tensor sequence = at::arange(call.kv.size(0)).repeat_interleave(call.kv.size(2));
  return at::where(index.ge(0), index + sequence * room, index);
}

void put(const LatentCache& call, const Out& cache, const at::Tensor& place, const at::Tensor& rows) {
  const at::Tensor kept = place.ge(0).nonzero().flatten();
  const at::Tensor to = place.index_select(0, kept);
  const at::Tensor flat = rows.reshape({-1, rows.size(-1)}).index_select(0, kept).to(cache.scalar_type());
  if (call.mode != "PA_NZ") {
    cache.view({-1, cache.size(3)}).index_copy_(0, to, flat);
    return;
  }
  // In memory (blocks, D / 16, block size, 16), whatever the shape says.
  const int64_t size = cache.size(1);
  const at::Tensor blocks = cache.view({cache.size(0), -1, size, 16}).transpose(1, 2);
  const c10::List<std::optional<at::Tensor>> where({to.div(size, "floor"), to.remainder(size)});
  blocks.index_put_(where, flat.view({flat.size(0), -1, 16}));
}

Work latent(LatentCache call) {
  check_latent(call);
  // the outputs beside the caches are not counted
  const int64_t rows = bytes_of(call.kv);
  costs({rows + bytes_of(call.gamma) + bytes_of(call.cos) + bytes_of(call.sin) + bytes_of(call.index), rows});
  return [call = std::move(call)] {
    const int64_t value = call.gamma.size(0), rope = call.cos.size(3);
    const at::Tensor wide = call.kv.to(at::kFloat);
    const at::Tensor x = wide.narrow(-1, 0, value);
    const at::Tensor normed =
        x * at::rsqrt(at::mean(x * x, -1, true) + call.epsilon) * call.gamma.to(at::kFloat);
    const at::Tensor turned = rotated_apart(wide.narrow(-1, value, rope), call.cos, call.sin);
    const at::Tensor place = places(call);
    put(call, call.k_cache, place, turned);
    put(call, call.ckv_cache, place, normed);
    if (!call.output) return;
    if (call.k_rope) call.k_rope->set(turned);
    if (call.c_kv) call.c_kv->set(normed);
  };
}

void require_unquantised(const std::vector<Maybe>& tensors) {
  for (const Maybe& tensor : tensors) {
    if (tensor) require(false, tensor->name, "is not simulated: the simulated cache is not quantised");
  }
}

}  // namespace

OPERATOR(aclnnKvRmsNormRopeCache,
         (In kv, In gamma, In cos, In sin, In index, Out k_cache, Out ckv_cache, Maybe k_rope_scale,
          Maybe c_kv_scale, Maybe k_rope_offset, Maybe c_kv_offset, double epsilon, Text cache_mode,
          bool is_output_kv, MaybeOut k_rope, MaybeOut c_kv),
         {
           require_unquantised({k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset});
           return latent({kv, gamma, cos, sin, index, k_cache, ckv_cache, epsilon, cache_mode, is_output_kv,
                          k_rope, c_kv});
         })

OPERATOR(aclnnKvRmsNormRopeCacheV2,
         (In kv, In gamma, In cos, In sin, In index, Out k_cache, Out ckv_cache, Maybe k_rope_scale,
          Maybe c_kv_scale, Maybe k_rope_offset, Maybe c_kv_offset, Maybe v, double epsilon, Text cache_mode,
          bool is_output_kv, MaybeOut k_rope, MaybeOut c_kv),
         {
           require_unquantised({k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset});
           require(!v, "v", "a value of its own is not simulated");
           return latent({kv, gamma, cos, sin, index, k_cache, ckv_cache, epsilon, cache_mode, is_output_kv,
                          k_rope, c_kv});
         })

}  // namespace ascend_sim
