"""Llama 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_vllm.models.blocks import DecoderForCausalLM, LayerOptions


class LlamaForCausalLM(DecoderForCausalLM):
    """The shared decoder with optional biases."""

    @classmethod
    def layer_options(cls, hf_config: Mapping[str, Any], index: int) -> LayerOptions:  # noqa: ARG003 - layers are alike
        """`attention_bias` covers all four projections of attention, `mlp_bias` all three of the MLP."""
        attention_bias = bool(hf_config.get("attention_bias", False))
        return LayerOptions(
            qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=bool(hf_config.get("mlp_bias", False))
        )
