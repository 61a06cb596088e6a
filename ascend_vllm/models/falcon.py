"""Falcon and Falcon 2."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class FalconForCausalLM(DecoderForCausalLM):
    """The shared decoder with LayerNorms, plain MLPs, and attention beside them."""

    renames = (
        ("transformer.word_embeddings", "model.embed_tokens"),
        ("transformer.ln_f", "model.norm"),
        ("transformer.h.", "model.layers."),
        (".self_attention.query_key_value.", ".self_attn.qkv_proj."),
        (".self_attention.dense.", ".self_attn.o_proj."),
        (".dense_h_to_4h.", ".up_proj."),
        (".dense_4h_to_h.", ".down_proj."),
    )
