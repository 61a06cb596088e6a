"""Gemma 2, and the text part of Gemma 3."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class Gemma2ForCausalLM(DecoderForCausalLM):
    """The shared decoder with norms on both sides of attention and MLP."""

    renames = (
        (".post_attention_layernorm.", ".post_self_attn_layernorm."),
        (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
        (".post_feedforward_layernorm.", ".post_mlp_layernorm."),
    )
