"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The shared decoder with biases on query, key and value; windows may differ from layer to layer."""
