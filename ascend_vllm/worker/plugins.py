"""The attention backends that a worker chooses from, as "module:Class".

Classes are imported when they are considered; a new backend is a file and a row here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

import torch

from ascend_vllm.attention.backend import AttentionBackend
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.attention import Attention

# device type → attention backends in order of preference
ATTENTION_BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("ascend_vllm.attention.cpu:CpuAttention",),
    "npu": ("ascend_vllm.attention.ascend:AscendAttention",),
}


def select_attention_backend(
    device_type: str, layers: Sequence[Attention], dtype: torch.dtype, block_size: int
) -> type[AttentionBackend]:
    """The first backend of a device that supports all attention layers of a model.

    Args:
        device_type: a key of ATTENTION_BACKENDS.
        layers: of the model.
        dtype: of queries, keys and values.
        block_size: tokens of a KV block.

    Raises:
        ConfigError: there is none; the message has the reason of each.
    """
    kinds = dict.fromkeys((layer.spec, layer.kv_cache_spec(block_size)) for layer in layers)
    refusals = []
    for path in ATTENTION_BACKENDS[device_type]:
        backend: type[AttentionBackend] = pkgutil.resolve_name(path)
        reasons = [
            backend.refuses(spec, dtype, block_size) or backend.refuses_cache(cache, dtype) for spec, cache in kinds
        ]
        refused = [reason for reason in reasons if reason]
        if not refused:
            return backend
        refusals.append(f"{backend.name}: {refused[0]}")
    raise ConfigError(
        f"no attention backend of device {device_type!r} can serve this model"
        + (f" ({'; '.join(refusals)})" if refusals else ": it has none")
    )
