"""Architectures made by hand, for configurations of models that do not exist."""

from __future__ import annotations

from typing import Any

from ascend_vllm.config.arch import ArchConfig, LayerPlan


def make_arch(num_layers: int = 2, **fields: Any) -> ArchConfig:
    """A small decoder; `fields` are `ArchConfig`'s."""
    sizes = {"vocab_size": 600, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_size": 16}
    values = sizes | {"embedding_size": 64, "layers": (LayerPlan(),) * num_layers} | fields
    return ArchConfig(**values)
