// Rules of arguments that several attention operators have in common. Sources: the documentation of the
// operators in torch_npu (`_op_plugin_docs.py`) and of aclnnFusedInferAttentionScoreV3/V4,
// aclnnPromptFlashAttentionV3 and aclnnIncreFlashAttentionV4 in CANN's ops-transformer.
#include <algorithm>

#include "sim/opapi/attention.h"

namespace ascend_sim {
namespace {

int64_t rounded(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// A compressed mask stands for all masks that follow from lengths.
void require_compressed_mask(const AttentionCall& call) {
  const In& mask = *call.mask;
  mask.rank(2, 4);
  bool fits = mask.size(-1) == 2048 && mask.size(-2) == 2048;
  for (int64_t d = 0; d < mask.dim() - 2; ++d) fits = fits && mask.size(d) == 1;
  require(fits, mask.name,
          "shape " + shape_text(mask.sizes()) +
              " must be [2048, 2048], [1, 2048, 2048] or [1, 1, 2048, 2048] with " + "sparse_mode " +
              std::to_string(call.sparse_mode));
}

// A full mask covers every query row and key; axes that are not aligned may be rounded up.
void require_full_mask(const AttentionCall& call) {
  const In& mask = *call.mask;
  mask.rank(2, 4);
  const int64_t rows = mask.size(-2), keys = mask.size(-1);
  const bool one_row = call.query_rows == 1 && mask.dim() == 2;
  const std::string shape = "shape " + shape_text(mask.sizes());
  if (one_row) {
    require(rows == call.batch || rows == 1, mask.name,
            shape + " must have a row for each of the " + std::to_string(call.batch) + " sequences");
  } else {
    require(rows >= call.query_rows && rows <= rounded(call.query_rows, 32), mask.name,
            shape + " must have " + std::to_string(call.query_rows) + " rows");
  }
  require(keys >= call.kv_rows && (call.paged() || keys <= rounded(call.kv_rows, 32)), mask.name,
          shape + " must have " + std::to_string(call.kv_rows) + " columns" +
              (call.paged() ? " (blocks of the table times block_size)" : ""));
  if (mask.dim() >= 3) {
    require(mask.size(0) == 1 || mask.size(0) == call.batch, mask.name,
            shape + " must have 1 or " + std::to_string(call.batch) + " in front");
  }
  if (mask.dim() == 4) {
    require(mask.size(1) == 1 || (call.scale_bias && mask.size(1) == call.heads), mask.name,
            shape + " must have one head");
  }
}

void require_window(const AttentionCall& call) {
  require(call.pre + call.next >= 0, call.names.pre,
          std::to_string(call.pre) + " and " + call.names.next + " " + std::to_string(call.next) +
              " leave no tokens between them");
  for (size_t i = 0; i < call.query_spans.size(); ++i) {
    require(call.pre >= -call.query_spans[i].length, call.names.pre,
            std::to_string(call.pre) + " is beyond sequence " + std::to_string(i));
    require(call.next >= -call.kv_spans[i].length, call.names.next,
            std::to_string(call.next) + " is beyond sequence " + std::to_string(i));
  }
}

}  // namespace

void require_dtypes(const AttentionCall& call, const Dtypes& allowed) {
  call.query.in(soc() == Soc::P310 ? Dtypes{at::kHalf} : allowed);
  if (call.quantised()) {
    call.key.in({at::kChar});
    call.value.in({at::kChar});
  } else {
    call.key.like(call.query);
    call.value.like(call.query);
  }
  if (call.pse) call.pse->like(call.query);
}

void require_layout(const AttentionCall& call, const std::vector<std::string>& allowed) {
  std::string known;
  for (const std::string& name : allowed) known += (known.empty() ? "" : ", ") + name;
  require(std::find(allowed.begin(), allowed.end(), call.layout) != allowed.end(), "input_layout",
          "\"" + call.layout + "\" is not one of " + known);
}

void require_mask(const AttentionCall& call) {
  require(call.sparse_mode >= 0 && call.sparse_mode <= 4, "sparse_mode",
          std::to_string(call.sparse_mode) + " is not supported (0 to 4)");
  require(call.sparse_mode == 0 || call.mask, "atten_mask",
          "must be given with sparse_mode " + std::to_string(call.sparse_mode));
  if (!call.mask) return;
  call.mask->in({at::kBool, at::kChar, at::kByte}).dense();
  if (call.sparse_mode >= 2) {
    require_compressed_mask(call);
  } else {
    require_full_mask(call);
  }
  if (call.sparse_mode == 4) require_window(call);
}

void require_dense(const AttentionCall& call) {
  call.query.dense();
  call.key.dense();
  call.value.dense();
  if (!call.pse) return;
  const In& pse = call.pse->dense().rank(4, 4);
  require((pse.size(0) == 1 || pse.size(0) == call.batch) && pse.size(1) == call.heads &&
              (pse.size(2) == 1 || pse.size(2) >= call.query_rows) && pse.size(3) >= call.kv_rows,
          pse.name,
          "shape " + shape_text(pse.sizes()) + " must be [1 or batch, heads, rows, keys] for " +
              std::to_string(call.query_rows) + " rows and " + std::to_string(call.kv_rows) + " keys");
}

void require_absent(const Maybe& tensor) {
  if (tensor)
    require(false, tensor->name, "is not simulated: the simulated attention is not quantised or padded");
}

}  // namespace ascend_sim
