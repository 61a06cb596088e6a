"""How the workers of a group find each other."""

from __future__ import annotations

import datetime

from torch._C._distributed_c10d import TCPStore

from ascend_vllm.distributed.collectives import Alone, Collectives, GroupCollectives, OrderedCollectives
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.distributed.rendezvous import Rendezvous
from ascend_vllm.platforms.interface import Platform

# for all workers to have come; whoever started them notices sooner if one of them died
_MEETING_TIMEOUT = datetime.timedelta(minutes=10)
# of one collective, when a worker that lives does not take part
_TIMEOUT = datetime.timedelta(minutes=30)


def join_group(platform: Platform, parallel: ParallelContext, rendezvous: Rendezvous | None) -> Collectives:
    """Connects this worker with the others; returns when all are there.

    Args:
        platform: initialised.
        parallel: this worker's place.
        rendezvous: where to meet; None for a worker alone.

    Raises:
        ValueError: there are others, and no place to meet.
        RuntimeError: they do not come.
    """
    if parallel.tp_size == 1:
        return Alone()
    if rendezvous is None:
        raise ValueError("workers that share a model need a place to meet")
    store = TCPStore(
        rendezvous.host,
        rendezvous.port,
        parallel.tp_size,
        is_master=rendezvous.listening_socket is not None,
        timeout=_MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=rendezvous.listening_socket,
    )
    group = platform.process_group(store, parallel.tp_rank, parallel.tp_size, _TIMEOUT)
    kind = OrderedCollectives if platform.device_type == "cpu" else GroupCollectives
    return kind(group, parallel.tp_size)
