"""Baichuan 1 and 2."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class BaichuanForCausalLM(DecoderForCausalLM):
    """The shared decoder with a fused projection, in the 13B models with ALiBi."""

    renames = ((".W_pack.", ".qkv_proj."),)
