"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.models.blocks import DecoderForCausalLM, LayerOptions


def sliding_window_of_layer(hf_config: Mapping[str, Any], index: int) -> int | None:
    """The window of one layer of a Qwen model; None: it sees everything.

    `use_sliding_window` must be set for any window. `layer_types` then says which layers have it; configs from
    before that field keep full attention in the first `max_window_layers` layers.

    Raises:
        ModelLoadError: `layer_types` names another kind of attention.
    """
    window = hf_config.get("sliding_window")
    if window is None or not hf_config.get("use_sliding_window", False):
        return None
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        return int(window) if index >= int(hf_config.get("max_window_layers") or 0) else None
    if layer_types[index] == "full_attention":
        return None
    if layer_types[index] == "sliding_attention":
        return int(window)
    raise ModelLoadError(f"config.json: layer_types has {layer_types[index]!r}, which is not supported")


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The shared decoder with biases on query, key and value."""

    @classmethod
    def layer_options(cls, hf_config: Mapping[str, Any], index: int) -> LayerOptions:
        """Biases are not optional in this family; windows may differ from layer to layer."""
        return LayerOptions(qkv_bias=True, sliding_window=sliding_window_of_layer(hf_config, index))
