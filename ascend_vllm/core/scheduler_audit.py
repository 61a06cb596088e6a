"""The scheduler's accounts, written out and checked: for tests, for the audit utility, and for when it goes idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ascend_vllm.core.request import NO_SLOT, Request, RequestStatus
from ascend_vllm.core.rows import rows_of

if TYPE_CHECKING:
    from ascend_vllm.core.scheduler import Scheduler

_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED)


def audit_scheduler(scheduler: Scheduler) -> dict[str, Any]:
    """The accounts of blocks and slots.

    Returns:
        num_blocks, num_free_blocks, num_slots, num_free_slots, num_running, num_waiting: counts (running ones are
        rows, of which a beam search has several);
        blocks_by_request: number of device blocks of each request that has some, those of its rows added up;
        violations: sentences, none if all is consistent.
    """
    kv_cache = scheduler.kv_cache
    owners = list(_owners(scheduler))
    blocks_by_request = {
        request.request_id: sum(len(row.block_ids) for row in rows_of(request))
        for request in scheduler.requests.values()
        if any(row.block_ids for row in rows_of(request))
    }
    return {
        "num_blocks": kv_cache.num_blocks,
        "num_free_blocks": kv_cache.num_free_blocks,
        "num_slots": scheduler.config.max_num_seqs,
        "num_free_slots": len(scheduler.rows.free_slots),
        "num_running": len(scheduler.rows.running),
        "num_waiting": len(scheduler.waiting),
        "blocks_by_request": blocks_by_request,
        "violations": kv_cache.violations(owners) + _slot_violations(scheduler) + _queue_violations(scheduler),
    }


def _owners(scheduler: Scheduler) -> Iterator[Request]:
    for request in scheduler.requests.values():
        yield from rows_of(request)


def _slot_violations(scheduler: Scheduler) -> list[str]:
    wrong = [
        f"{request} is not in its slot" for slot, request in scheduler.rows.by_slot.items() if request.slot != slot
    ]
    if sorted([*scheduler.rows.by_slot, *scheduler.rows.free_slots]) != list(range(scheduler.config.max_num_seqs)):
        wrong.append("a slot is lost or taken twice")
    if sorted(map(id, scheduler.rows.running)) != sorted(map(id, scheduler.rows.by_slot.values())):
        wrong.append("the running requests are not those in slots")
    groups = [request.beam_group for request in scheduler.requests.values() if request.beam_group is not None]
    reserved = sum(group.num_reserved_slots for group in groups)
    if reserved != scheduler.rows.num_reserved or reserved > len(scheduler.rows.free_slots):
        wrong.append(f"{scheduler.rows.num_reserved} slots are reserved, {reserved} are asked for")
    wrong += [
        f"{group.root} has {len(group.rows)} rows and {group.num_reserved_slots} reserved slots"
        for group in groups
        if group.root.status is RequestStatus.RUNNING and len(group.rows) + group.num_reserved_slots != group.width
    ]
    return wrong


def _queue_violations(scheduler: Scheduler) -> list[str]:
    wrong = [f"{r} is among the running" for r in scheduler.rows.running if r.status is not RequestStatus.RUNNING]
    wrong += [
        f"{r} is among the waiting"
        for r in scheduler.waiting
        if r.status not in _WAITING or r.slot != NO_SLOT or r.block_ids
    ]
    running = {id(row if row.beam_group is None else row.beam_group.root) for row in scheduler.rows.running}
    waiting = set(map(id, scheduler.waiting))
    if running & waiting or running | waiting != set(map(id, scheduler.requests.values())):
        wrong.append("a request neither runs nor waits, or does both")
    return wrong
