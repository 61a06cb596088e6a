"""How the workers of a group find each other."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from torch._C._distributed_c10d import TCPStore

from ascend_vllm.distributed.collectives import Collectives, GroupCollectives, OrderedCollectives, SingleRank
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.distributed.rendezvous import Rendezvous
from ascend_vllm.platforms.interface import Platform
from ascend_vllm.platforms.listeners import deafen

# for all workers to have come; whoever started them notices sooner if one of them died
_MEETING_TIMEOUT = datetime.timedelta(minutes=10)
# of one collective, when a worker that lives does not take part
_TIMEOUT = datetime.timedelta(minutes=30)


@dataclasses.dataclass(frozen=True)
class Groups:
    """How a worker reaches the others.

    Attributes:
        collectives: of those that share its layers.
        stages: of those that hold the same part of the other stages, in their order; None: there is one stage.
    """

    collectives: Collectives
    stages: Any = None


def join_groups(platform: Platform, parallel: ParallelContext, rendezvous: Rendezvous | None) -> Groups:
    """Connects this worker with the others; returns when all are there.

    Args:
        platform: initialised.
        parallel: this worker's place.
        rendezvous: where to meet; None for a worker alone.

    Raises:
        ValueError: there are others, and no place to meet.
        RuntimeError: they do not come.
    """
    if parallel.world_size == 1:
        return Groups(SingleRank())
    if rendezvous is None:
        raise ValueError("workers that share a model need a place to meet")
    store = TCPStore(
        rendezvous.host,
        rendezvous.port,
        parallel.world_size,
        is_master=rendezvous.listening_socket is not None,
        timeout=_MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=rendezvous.listening_socket,
    )
    tp_size, world_size = parallel.tp_size, parallel.world_size
    sharing = [range(first, first + tp_size) for first in range(0, world_size, tp_size)]
    stages = [range(first, world_size, tp_size) for first in range(tp_size)]
    partitions = [partition for partition in (sharing, stages) if len(partition[0]) > 1]
    groups = iter(platform.process_groups(store, parallel.rank, partitions, _TIMEOUT))
    if not platform.needs_store_later:
        _close_to_others(store, parallel, rendezvous)
    kind = OrderedCollectives if platform.device_type == "cpu" else GroupCollectives
    return Groups(
        kind(next(groups), tp_size) if tp_size > 1 else SingleRank(), next(groups) if parallel.pp_size > 1 else None
    )


def _close_to_others(store: TCPStore, parallel: ParallelContext, rendezvous: Rendezvous) -> None:
    """Nobody connects with the store any more, which asks nobody who he is; returns when all workers have met."""
    store.set(f"has met/{parallel.rank}", "")
    if rendezvous.listening_socket is not None:
        store.wait([f"has met/{rank}" for rank in range(parallel.world_size)])
        deafen(rendezvous.listening_socket)
