"""Copies of whole KV blocks: within the device's cache, and between it and a pool in CPU memory.

Letters: P blocks of a cache, C blocks copied at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ascend_vllm.attention.backend import AttentionBackend
from ascend_vllm.types.step import MoveKind

# A move's contents pass through a buffer of a layer's blocks; this bounds it.
_MOST_AT_ONCE = 64


class BlockMover:
    """Carries out a step's block moves in all layers.

    Args:
        backend: knows how a layer's cache is laid out.
        kv_caches: one per layer, on the device.
        cpu_caches: one per layer, in CPU memory; empty if there is no swapping.

    Example::

        mover.move([(MoveKind.SWAP_OUT, 7, 0), (MoveKind.COPY, 3, 7)])
    """

    def __init__(
        self, backend: AttentionBackend, kv_caches: Sequence[torch.Tensor], cpu_caches: Sequence[torch.Tensor]
    ) -> None:
        self._backend = backend
        # kind → source and target of each layer
        self._layers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {
            MoveKind.COPY: list(zip(kv_caches, kv_caches, strict=True))
        }
        if cpu_caches:
            self._layers[MoveKind.SWAP_OUT] = list(zip(kv_caches, cpu_caches, strict=True))
            self._layers[MoveKind.SWAP_IN] = list(zip(cpu_caches, kv_caches, strict=True))

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies blocks as if one after another, in the order of `moves`.

        Args:
            moves: as SchedulerOutput.block_moves: (MoveKind, source block, target block).

        Raises:
            ValueError: a move swaps, and there is no CPU pool; or a kind of move is unknown.
            IndexError, RuntimeError: a block is none of its pool.
        """
        for kind, sources, targets in batches(moves):
            if kind not in self._layers:
                raise ValueError(
                    f"a step moves blocks of kind {kind}, which this worker cannot do: "
                    "it has no CPU pool (--swap-space) or does not know the kind"
                )
            self._copy(self._layers[kind], np.array(sources, np.int64), np.array(targets, np.int64))

    def _copy(
        self,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
        sources: np.ndarray[tuple[int], np.dtype[np.int64]],
        targets: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        first_source, first_target = layers[0]
        source_blocks = torch.from_numpy(sources).to(first_source.device)
        target_blocks = torch.from_numpy(targets).to(first_target.device)
        for source, target in layers:
            self._backend.copy_blocks(source, source_blocks, target, target_blocks)


def batches(moves: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Cuts moves into runs whose sources may all be read before a target is written.

    A run ends before a move of another kind, one that reads what the run writes, and one that writes what the
    run writes. The loop is over moves, each of which copies a block in every layer.

    Returns:
        kind, source blocks and target blocks of each run.

    Example::

        list(batches([(0, 1, 2), (0, 3, 1), (0, 2, 4)]))     # [(0, [1, 3], [2, 1]), (0, [2], [4])]
    """
    sources: list[int] = []
    targets: list[int] = []
    written: set[int] = set()
    current = -1
    for kind, source, target in moves:
        # a swap reads one pool and writes the other
        reads_written = kind == MoveKind.COPY and source in written
        if kind != current or reads_written or target in written or len(sources) == _MOST_AT_ONCE:
            if sources:
                yield current, sources, targets
            current, sources, targets, written = kind, [], [], set()
        sources.append(source)
        targets.append(target)
        written.add(target)
    if sources:
        yield current, sources, targets
