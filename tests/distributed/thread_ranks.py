"""Ranks of a tensor-parallel group as threads of one process: layers and models without processes or sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ascend_vllm.distributed.collectives import Collectives, concat_columns, sum_in_order
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.layers.context import BuildContext

T = TypeVar("T")
TIMEOUT_S = 60.0


class _ThreadCollectives(Collectives):
    def __init__(self, rank: int, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._parts = parts
        self._barrier = barrier

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        self._parts[self._rank] = x
        self._barrier.wait(TIMEOUT_S)
        gathered = torch.stack(self._parts)
        self._barrier.wait(TIMEOUT_S)
        return gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return sum_in_order(self._gather(x))

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        return concat_columns(self._gather(x), num_columns)


def on_ranks(
    size: int, function: Callable[[BuildContext], T], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[T]:
    """Calls a function concurrently for each rank; returns the results."""
    barrier = threading.Barrier(size)
    parts = [torch.empty(0)] * size

    def call(rank: int) -> T:
        collectives = _ThreadCollectives(rank, parts, barrier)
        try:
            return function(BuildContext(dtype, torch.device(device), ParallelContext(rank, size), collectives))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))
