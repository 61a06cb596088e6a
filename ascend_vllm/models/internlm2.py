"""InternLM 2 and 2.5."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class InternLM2ForCausalLM(DecoderForCausalLM):
    """The shared decoder with one projection for queries, keys and values, by KV heads."""

    renames = (
        ("model.tok_embeddings", "model.embed_tokens"),
        (".attention.wqkv.", ".self_attn.qkv_proj."),
        (".attention.wo.", ".self_attn.o_proj."),
        (".attention_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        (".feed_forward.w1.", ".mlp.gate_proj."),
        (".feed_forward.w3.", ".mlp.up_proj."),
        (".feed_forward.w2.", ".mlp.down_proj."),
    )

    @classmethod
    def checkpoint_name(cls, name: str) -> str:
        """As in the shared decoder; the head has a name of its own."""
        return super().checkpoint_name(
            f"lm_head.{name.removeprefix('output.')}" if name.startswith("output.") else name
        )
