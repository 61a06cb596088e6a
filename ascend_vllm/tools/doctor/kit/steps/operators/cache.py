"""Writes to the KV cache, with slots that are negative, repeated and beyond it, and copies of blocks."""

from __future__ import annotations

import functools

import torch

from ascend_vllm.attention.ascend_calls import copy_blocks, store_kv
from ascend_vllm.tools.doctor.kit.rows import Status
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session
from ascend_vllm.tools.doctor.kit.steps.operators.comparing import DTYPES, dtype_name

_BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE = 128, 8, 128


def cases(session: Session) -> list[Case]:
    """See `steps`. What may leave the device unusable comes last."""
    found = [
        Case(f"cache write {dtype_name(dtype)}", functools.partial(_run_write, session, dtype, "ordinary"))
        for dtype in DTYPES
    ]
    found += [
        Case(f"copies of blocks to {where}", functools.partial(_run_copy, session, where)) for where in ("npu", "cpu")
    ]
    found += [
        Case(f"cache write with {kind} slots", functools.partial(_run_write, session, torch.float16, kind))
        for kind in ("repeated", "negative", "too large")
    ]
    return found


def _run_write(session: Session, dtype: torch.dtype, kind: str) -> Result:
    """Documented are slots within the cache, none twice; the others tell what happens."""
    session.begin()
    num_blocks, tokens = session.size((64, 2048), (3, 40))
    shape = (2, num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE)
    room = num_blocks * _BLOCK_SIZE
    generator = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, tokens, _KV_HEADS, _HEAD_SIZE, generator=generator).to(dtype).unbind(0)
    slots = torch.randperm(room, generator=generator)[:tokens]
    if kind == "repeated":
        slots[1] = slots[0]
    if kind == "negative":
        slots[0] = -1
    if kind == "too large":
        slots[0] = room
    cache = torch.zeros(shape, dtype=dtype).to("npu")
    on_device = key.to("npu"), value.to("npu"), cache, slots.to("npu")
    _, numbers = session.measure(lambda: store_kv(*on_device))
    got = cache.cpu().view(2, room, _KV_HEADS, _HEAD_SIZE)
    expected = torch.zeros(shape, dtype=dtype).view(2, room, _KV_HEADS, _HEAD_SIZE)
    first = {"ordinary": 0, "repeated": 2}.get(kind, 1)
    for half, part in zip(expected.unbind(0), (key, value), strict=True):
        half[slots[first:]] = part[first:]
    facts = {}
    if kind == "repeated":
        place = int(slots[0])
        names = ("first", "last")
        taken = [name for name, numbers_ in zip(names, key, strict=False) if torch.equal(got[0, place], numbers_)]
        facts = {"taken": taken[0] if taken else "neither"}
        got[:, place] = 0
    is_right = torch.equal(got, expected)
    status = Status.OK if is_right else Status.WRONG
    return Result(
        status, numbers, facts, "" if is_right else "other slots than those were written, or with other values"
    )


def _run_copy(session: Session, where: str) -> Result:
    """Some blocks of a cache to others of it, or to the host."""
    session.begin()
    num_blocks, count = session.size((256, 32), (6, 2))
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randn(num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE, generator=generator).half()
    cache = blocks.to("npu")
    order = torch.randperm(num_blocks, generator=generator)
    source, target = order[:count], order[count : 2 * count]
    other = cache if where == "npu" else torch.zeros_like(blocks)
    on_device = source.to("npu"), target.to(where)
    _, numbers = session.measure(lambda: copy_blocks(cache, on_device[0], other, on_device[1]))
    is_right = torch.equal(other.cpu()[target], blocks[source])
    return Result.of(is_right, "blocks differ from what was copied", **numbers)
