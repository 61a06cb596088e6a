"""Qwen3 (dense)."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The shared decoder with queries and keys normalised per head."""
