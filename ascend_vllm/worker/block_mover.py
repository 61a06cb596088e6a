"""Copies whole KV blocks: within the device's cache, and between it and a pool in CPU memory.

Letters: P blocks of a cache, C blocks copied at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ascend_vllm.attention.backend import AttentionBackend, LayerCache
from ascend_vllm.types.step import MoveKind

# blocks are copied through a buffer of this many blocks of a layer
_MAX_BLOCKS_PER_COPY = 64


class _Pool(NamedTuple):
    # one per layer
    caches: Sequence[LayerCache]
    device: torch.device


class BlockMover:
    """Copies the blocks of a step's block moves in all layers.

    Args:
        backend: knows the layout of the caches.
        kv_caches: one per layer, on the device.
        cpu_caches: one per layer, in CPU memory; empty if there is no swapping.
        device: that of `kv_caches`.

    Example::

        mover.move([(MoveKind.SWAP_OUT, 7, 0), (MoveKind.COPY, 3, 7)])
    """

    def __init__(
        self,
        backend: AttentionBackend,
        kv_caches: Sequence[LayerCache],
        cpu_caches: Sequence[LayerCache],
        device: torch.device,
    ) -> None:
        self._backend = backend
        on_device, on_host = _Pool(kv_caches, device), _Pool(cpu_caches, torch.device("cpu"))
        # kind → source and target
        self._pools: dict[int, tuple[_Pool, _Pool]] = {MoveKind.COPY: (on_device, on_device)}
        if cpu_caches:
            self._pools[MoveKind.SWAP_OUT] = (on_device, on_host)
            self._pools[MoveKind.SWAP_IN] = (on_host, on_device)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies blocks as if one after another, in the order of `moves`.

        Args:
            moves: as SchedulerOutput.block_moves: (MoveKind, source block, target block).

        Raises:
            ValueError: a move swaps and there is no CPU pool, or the kind of a move is unknown.
            IndexError, RuntimeError: a block is not in its pool.
        """
        for kind, sources, targets in batches(moves):
            if kind not in self._pools:
                raise ValueError(
                    f"a step moves blocks of kind {kind}, which this worker cannot do: "
                    "it has no CPU pool (--swap-space) or does not know the kind"
                )
            self._copy(*self._pools[kind], np.array(sources, np.int64), np.array(targets, np.int64))

    def _copy(
        self,
        source: _Pool,
        target: _Pool,
        sources: np.ndarray[tuple[int], np.dtype[np.int64]],
        targets: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        source_blocks = torch.from_numpy(sources).to(source.device)
        target_blocks = torch.from_numpy(targets).to(target.device)
        for source_cache, target_cache in zip(source.caches, target.caches, strict=True):
            self._backend.copy_blocks(source_cache, source_blocks, target_cache, target_blocks)


def batches(moves: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Splits moves into batches whose sources can all be read before a target is written.

    A batch ends before a move of another kind, or one that reads or writes a target of the batch.

    Returns:
        kind, source blocks and target blocks of each batch.

    Example::

        list(batches([(0, 1, 2), (0, 3, 1), (0, 2, 4)]))     # [(0, [1, 3], [2, 1]), (0, [2], [4])]
    """
    sources: list[int] = []
    targets: list[int] = []
    written: set[int] = set()
    current = -1
    for kind, source, target in moves:
        # swaps read one pool and write the other
        reads_written = kind == MoveKind.COPY and source in written
        if kind != current or reads_written or target in written or len(sources) == _MAX_BLOCKS_PER_COPY:
            if sources:
                yield current, sources, targets
            current, sources, targets, written = kind, [], [], set()
        sources.append(source)
        targets.append(target)
        written.add(target)
    if sources:
        yield current, sources, targets
