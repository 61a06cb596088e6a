"""StarCoder 2."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """The shared decoder with LayerNorms and plain MLPs."""

    renames = (
        (".c_fc.", ".up_proj."),
        (".c_proj.", ".down_proj."),
    )
