// Keys and values of one byte per number in the fused operator, in the forms that decoding uses. Sources: the
// documentation of npu_fused_infer_attention_score (modes 0 and 5, one query row per sequence) and CANN's host
// checks of it: layouts of tokens one after another and several query rows over blocks take no such keys.
#include "sim/opapi/aten.h"
#include "sim/opapi/attention.h"

namespace ascend_sim {
namespace {

// The number of each channel in the layout's order of axes, with an axis of one in front or without.
bool is_per_channel(const AttentionCall& call, at::IntArrayRef sizes) {
  const int64_t heads = call.kv_heads, dim = call.query_dim;
  std::vector<int64_t> wanted = {heads * dim};
  if (call.layout == "BNSD") wanted = {heads, 1, dim};
  if (call.layout == "BSND") wanted = {heads, dim};
  if (sizes == at::IntArrayRef(wanted)) return true;
  wanted.insert(wanted.begin(), 1);
  return sizes == at::IntArrayRef(wanted);
}

void require_scales(const AttentionCall& call, const KvScales& scales) {
  require(scales.scale.has_value(), scales.name, "must be given for keys and values of int8");
  const In& scale = scales.scale->dense();
  const std::string shape = "shape " + shape_text(scale.sizes());
  if (scales.mode == kPerChannel) {
    scale.like(call.query);
    const bool is_one = scale.dim() == 1 && scale.numel() == 1;
    require(is_one || is_per_channel(call, scale.sizes()), scale.name,
            shape + " must have a number for each channel of " + std::to_string(call.kv_heads) + " heads of " +
                std::to_string(call.query_dim) + " in the layout " + call.layout + ", or one for all");
  } else {
    require(scales.mode == kPagedPerTokenHead, scales.name,
            "mode " + std::to_string(scales.mode) + " is not simulated (0 or 5)");
    require(call.paged(), scales.name, "mode 5 needs a block table");
    scale.in({at::kFloat});
    const CacheShape cache = cache_shape(call.key, call.kv_heads);
    scale.shaped({cache.blocks, call.kv_heads, cache.block_size});
  }
  if (scales.offset) scales.offset->like(scale).shaped(scale.sizes());
}

}  // namespace

void require_quantised_kv(const AttentionCall& call) {
  require(!call.packed(), "input_layout", call.layout + " takes no keys and values of int8");
  require_layout(call, {"BSH", "BSND", "BNSD"});
  require(!call.has_rope(), "query_rope", "is not simulated with keys and values of int8");
  require(
      call.query_rows == 1, call.query.name,
      std::to_string(call.query_rows) + " query rows: " +
          (call.paged() ? "keys of int8 in blocks are for one row" : "keys of int8 are simulated for one row"));
  require(call.query_dim % 32 == 0, call.query.name,
          "head size " + std::to_string(call.query_dim) + " must be a multiple of 32 for keys of int8");
  if (call.paged()) {
    require(call.block_size % 32 == 0, "block_size",
            std::to_string(call.block_size) + " must be a multiple of 32 for keys of int8");
    const int64_t axes = call.layout == "BNSD" ? 4 : 3;
    require(call.key.dim() == axes, call.key.name,
            "the cache " + shape_text(call.key.sizes()) + " must have " + std::to_string(axes) +
                " axes in the layout " + call.layout);
  }
  require(call.key_scales.mode == call.value_scales.mode, call.value_scales.name,
          "its mode must be that of the keys");
  require_scales(call, call.key_scales);
  require_scales(call, call.value_scales);
  require(call.value_scales.scale->sizes() == call.key_scales.scale->sizes(), call.value_scales.name,
          "its shape must be that of the keys' scales");
}

at::Tensor dequantised(const AttentionCall& call, const KvScales& scales, const at::Tensor& bytes,
                       at::IntArrayRef ids) {
  const auto broadcast = [&](const In& given) -> at::Tensor {
    const at::Tensor numbers = given.to(at::kFloat);
    if (scales.mode == kPerChannel) {
      return numbers.numel() == 1 ? numbers : numbers.reshape({call.kv_heads, 1, call.query_dim});
    }
    const at::Tensor blocks = numbers.index_select(0, at::tensor(ids, at::kLong));
    return blocks.transpose(0, 1).reshape({call.kv_heads, -1}).narrow(1, 0, bytes.size(1)).unsqueeze(-1);
  };
  at::Tensor numbers = bytes.to(at::kFloat);
  if (scales.offset) numbers = numbers + broadcast(*scales.offset);
  return numbers * broadcast(*scales.scale);
}

}  // namespace ascend_sim
