"""Which part of a model a worker holds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ParallelContext:
    """Place of a worker in its tensor-parallel group.

    Attributes:
        tp_rank: 0 … tp_size-1.
        tp_size: workers that share each layer.
    """

    tp_rank: int = 0
    tp_size: int = 1
