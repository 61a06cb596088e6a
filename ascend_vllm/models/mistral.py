"""Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_vllm.models.blocks import DecoderForCausalLM, LayerOptions


class MistralForCausalLM(DecoderForCausalLM):
    """The shared decoder with one sliding window for all layers."""

    @classmethod
    def layer_options(cls, hf_config: Mapping[str, Any], index: int) -> LayerOptions:  # noqa: ARG003 - layers are alike
        """`sliding_window` may be null: later Mistral models see everything."""
        return LayerOptions(sliding_window=hf_config.get("sliding_window"))
