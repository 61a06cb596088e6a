"""Qwen3 (dense)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_vllm.models.blocks import DecoderForCausalLM, LayerOptions
from ascend_vllm.models.qwen2 import sliding_window_of_layer


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The shared decoder with queries and keys normalised per head."""

    @classmethod
    def layer_options(cls, hf_config: Mapping[str, Any], index: int) -> LayerOptions:
        """`attention_bias` covers all four projections of attention."""
        attention_bias = bool(hf_config.get("attention_bias", False))
        return LayerOptions(
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            sliding_window=sliding_window_of_layer(hf_config, index),
        )
