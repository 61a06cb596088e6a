"""Consistency checks of blocks and slots: for tests, the audit utility, and an engine that becomes idle."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ascend_vllm.core.kv.manager import KVCacheManager
from ascend_vllm.core.request import NO_SLOT, Request, RequestStatus
from ascend_vllm.core.rows import Rows, rows_of

_WAITING = (
    RequestStatus.WAITING_FOR_CONNECTOR,
    RequestStatus.WAITING,
    RequestStatus.PREEMPTED,
    RequestStatus.SWAPPED,
)


def audit(
    kv_cache: KVCacheManager, rows: Rows, waiting: Collection[Request], requests: Collection[Request]
) -> dict[str, Any]:
    """The state of blocks and slots, and its inconsistencies.

    Args:
        kv_cache: of the blocks.
        rows: of the slots.
        waiting: queued requests and those that wait for connectors.
        requests: all unfinished ones.

    Returns:
        num_blocks, num_free_blocks, num_slots, num_free_slots, num_running, num_waiting: counts (running ones are
        rows, of which a request may have several);
        blocks_by_request: number of device blocks of each request that has some, in all of its rows;
        violations: inconsistencies, a sentence each.
    """
    owners = [row for request in requests for row in rows_of(request)]
    num_blocks = {request.request_id: sum(len(row.block_ids) for row in rows_of(request)) for request in requests}
    return {
        "num_blocks": kv_cache.pool.num_blocks,
        "num_free_blocks": kv_cache.pool.num_free,
        "num_slots": rows.num_slots,
        "num_free_slots": len(rows.free_slots),
        "num_running": len(rows.running),
        "num_waiting": len(waiting),
        "blocks_by_request": {request_id: count for request_id, count in num_blocks.items() if count},
        "violations": [
            *kv_cache.violations(owners),
            *_slot_violations(rows),
            *_reservation_violations(rows, requests),
            *_queue_violations(rows, waiting, requests),
        ],
    }


def _slot_violations(rows: Rows) -> list[str]:
    wrong = [f"{row} is not in its slot" for slot, row in rows.by_slot.items() if row.slot != slot]
    if sorted([*rows.by_slot, *rows.free_slots]) != list(range(rows.num_slots)):
        wrong.append("a slot is lost or taken twice")
    if sorted(map(id, rows.running)) != sorted(map(id, rows.by_slot.values())):
        wrong.append("the running requests are not those in slots")
    return wrong


def _reservation_violations(rows: Rows, requests: Iterable[Request]) -> list[str]:
    """A running request's rows and reserved slots add up to its width."""
    reserved = sum(request.kind.num_reserved_slots for request in requests)
    wrong = [
        f"{request} has {len(rows_of(request))} rows and {request.kind.num_reserved_slots} reserved slots"
        for request in requests
        if request.status is RequestStatus.RUNNING
        and len(rows_of(request)) + request.kind.num_reserved_slots != request.kind.width
    ]
    if reserved != rows.num_reserved or reserved > len(rows.free_slots):
        wrong.append(f"{rows.num_reserved} slots are reserved, {reserved} are asked for")
    return wrong


def _queue_violations(rows: Rows, waiting: Iterable[Request], requests: Iterable[Request]) -> list[str]:
    wrong = [f"{row} is among the running" for row in rows.running if row.status is not RequestStatus.RUNNING]
    wrong += [
        f"{request} is among the waiting"
        for request in waiting
        if request.status not in _WAITING or request.slot != NO_SLOT or request.block_ids
    ]
    running_ids = {id(row.kind.root_of(row)) for row in rows.running}
    waiting_ids = set(map(id, waiting))
    if running_ids & waiting_ids or running_ids | waiting_ids != set(map(id, requests)):
        wrong.append("a request neither runs nor waits, or does both")
    return wrong
