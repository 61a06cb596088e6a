"""Mixtral."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class MixtralForCausalLM(DecoderForCausalLM):
    """The shared decoder with a mixture of experts in every layer."""

    renames = (
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
    )
