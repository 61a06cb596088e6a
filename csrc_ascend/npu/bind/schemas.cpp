// torch.ops.ascend_vllm_npu: what there is, and what each op writes.
#include <torch/library.h>

TORCH_LIBRARY(ascend_vllm_npu, m) {
  m.def(
      "store_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
      "str layout) -> ()");
  m.def(
      "norm_rope_store(Tensor query, Tensor key, Tensor value, Tensor? query_weight, Tensor? key_weight, "
      "float epsilon, Tensor positions, Tensor cos_sin, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, bool keeps_keys) -> (Tensor, Tensor, Tensor)");
  m.def(
      "lora_shrink(Tensor x, Tensor weights, Tensor adapters, Tensor order, Tensor(a!) y, float scale) -> ()");
  m.def("lora_expand(Tensor x, Tensor weights, Tensor adapters, Tensor order, Tensor(a!) y, int offset) -> ()");
  m.def(
      "edit_and_sample(Tensor logits, Tensor(a!) counts, Tensor count_rows, Tensor fresh_ids, Tensor "
      "repetition, "
      "Tensor frequency, Tensor presence, Tensor bitmask, Tensor mask_rows, Tensor temperature, Tensor top_k, "
      "Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, int nothing) -> Tensor");
}
