"""Qwen 1."""

from __future__ import annotations

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import DecoderForCausalLM


class QWenForCausalLM(DecoderForCausalLM):
    """The shared decoder with a fused projection; gate and up have names that tell nothing."""

    renames = (
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.ln_f", "model.norm"),
        ("transformer.h.", "model.layers."),
        (".attn.c_attn.", ".self_attn.qkv_proj."),
        (".attn.c_proj.", ".self_attn.o_proj."),
        (".ln_1.", ".input_layernorm."),
        (".ln_2.", ".post_attention_layernorm."),
        (".mlp.w1.", ".mlp.up_proj."),
        (".mlp.w2.", ".mlp.gate_proj."),
        (".mlp.c_proj.", ".mlp.down_proj."),
    )
    ignored_weights = (*DecoderForCausalLM.ignored_weights, r".*\.attn\.(masked_bias|bias)")

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        stated, names = config.arch.max_length, config.arch.extra.get("changes_beyond_length")
        if names and stated is not None and config.max_model_len > stated.num_tokens:
            raise ModelLoadError(
                f"config.json: {' and '.join(names)} begin behind seq_length ({stated.num_tokens}) and are not "
                f"supported, so max_model_len ({config.max_model_len}) must not exceed it"
            )
        super().__init__(config, context)
