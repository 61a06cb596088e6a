"""ChatGLM2, ChatGLM3 and GLM-4, in the layout of their own repositories."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class ChatGLMForCausalLM(DecoderForCausalLM):
    """The shared decoder with fused projections and half of each head rotated."""

    renames = (
        ("transformer.embedding.word_embeddings", "model.embed_tokens"),
        ("transformer.encoder.final_layernorm", "model.norm"),
        ("transformer.encoder.", "model."),
        ("transformer.output_layer", "lm_head"),
        (".self_attention.query_key_value.", ".self_attn.qkv_proj."),
        (".self_attention.dense.", ".self_attn.o_proj."),
        (".dense_h_to_4h.", ".gate_up_proj."),
        (".dense_4h_to_h.", ".down_proj."),
    )
    ignored_weights = (*DecoderForCausalLM.ignored_weights, r"transformer\.rotary_pos_emb\.inv_freq")
