"""Llama 1, 2 and 3."""

from __future__ import annotations

from ascend_vllm.models.blocks import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The shared decoder with optional biases."""
