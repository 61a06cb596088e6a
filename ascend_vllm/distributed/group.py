"""Creates the process groups of a worker: tensor parallelism and pipeline stages."""

from __future__ import annotations

import datetime
from typing import Any

from torch._C._distributed_c10d import TCPStore

from ascend_vllm.distributed.collectives import Collectives, GroupCollectives, OrderedCollectives, SingleRank
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.distributed.rendezvous import Rendezvous
from ascend_vllm.platforms.interface import Platform
from ascend_vllm.platforms.listeners import deafen

# until all workers have connected; the executor notices sooner if one of them died
_RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)
# of one collective, if a worker is alive but does not take part
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


def join_groups(
    platform: Platform, parallel: ParallelContext, rendezvous: Rendezvous | None
) -> tuple[Collectives, Any]:
    """Connects this worker with the others; returns when all are connected.

    Args:
        platform: initialised.
        parallel: this worker's ranks.
        rendezvous: address of the store; None for a single worker.

    Returns:
        The collectives of its tensor-parallel group, and the process group of the workers with the same
        tensor-parallel rank, one per stage in stage order; None with one stage.

    Raises:
        ValueError: there are several workers and no rendezvous.
        RuntimeError: the other workers did not connect in time.
    """
    if parallel.world_size == 1:
        return SingleRank(), None
    if rendezvous is None:
        raise ValueError("several workers need a rendezvous")
    store = TCPStore(
        rendezvous.host,
        rendezvous.port,
        parallel.world_size,
        is_master=rendezvous.listening_socket is not None,
        timeout=_RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=rendezvous.listening_socket,
    )
    tp_size, world_size = parallel.tp_size, parallel.world_size
    tensor_parallel = [range(first, first + tp_size) for first in range(0, world_size, tp_size)]
    pipelines = [range(first, world_size, tp_size) for first in range(tp_size)]
    partitions = [partition for partition in (tensor_parallel, pipelines) if len(partition[0]) > 1]
    groups = iter(platform.process_groups(store, parallel.rank, partitions, _COLLECTIVE_TIMEOUT))
    if not platform.needs_store_later:
        _stop_listening(store, parallel, rendezvous)
    kind = OrderedCollectives if platform.sums_in_rank_order else GroupCollectives
    collectives = kind(next(groups), tp_size) if tp_size > 1 else SingleRank()
    return collectives, next(groups) if parallel.pp_size > 1 else None


def _stop_listening(store: TCPStore, parallel: ParallelContext, rendezvous: Rendezvous) -> None:
    """Waits on rank 0 until all workers are connected, then closes the store's port, which has no authentication."""
    store.set(f"connected/{parallel.rank}", "")
    if rendezvous.listening_socket is not None:
        store.wait([f"connected/{rank}" for rank in range(parallel.world_size)])
        deafen(rendezvous.listening_socket)
