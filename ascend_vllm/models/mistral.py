"""Mistral."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """The shared decoder with one sliding window for all layers, or none."""
