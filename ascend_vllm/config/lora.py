"""LoRA's section of the configuration."""

from __future__ import annotations

import msgspec


class LoRAConfig(msgspec.Struct, frozen=True):
    """Limits of adapters.

    Attributes:
        max_loras: adapters that the requests of a step may use; each layer has memory for so many.
        max_rank: the largest rank of an adapter.
        max_cpu_loras: adapters that are kept loaded.
        dtype: of the adapters' weights, the name of a torch dtype.
        max_added_tokens: the most tokens that an adapter may add to the vocabulary; their ids follow the model's own.
        fully_sharded: ranks have shares of both matrices of a layer, otherwise one of the two is whole on every rank.
    """

    max_loras: int = 1
    max_rank: int = 16
    max_cpu_loras: int = 1
    dtype: str = "bfloat16"
    fully_sharded: bool = False
    max_added_tokens: int = 0
