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
    "npu": ("ascend_vllm.attention.ascend:AscendAttention", "ascend_vllm.attention.ascend_bytes:AscendInt8Attention"),
}
# the same for models with latent attention, of devices that have other backends for it
LATENT_BACKENDS: dict[str, tuple[str, ...]] = {
    "npu": ("ascend_vllm.attention.ascend_latent:AscendLatentAttention",),
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
    rejections = []
    paths = ATTENTION_BACKENDS[device_type]
    if any(layer.spec.latent is not None for layer in layers):
        paths = LATENT_BACKENDS.get(device_type, paths)
    for path in paths:
        backend: type[AttentionBackend] = pkgutil.resolve_name(path)
        reasons = [
            backend.unsupported_reason(spec, dtype, block_size) or backend.unsupported_cache_reason(cache, dtype)
            for spec, cache in kinds
        ]
        failed = [reason for reason in reasons if reason]
        if not failed:
            return backend
        rejections.append(f"{backend.name}: {failed[0]}")
    raise ConfigError(
        f"no attention backend of device {device_type!r} can serve this model"
        + (f" ({'; '.join(rejections)})" if rejections else ": it has none")
    )
