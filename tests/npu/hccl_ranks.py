"""One rank of the tests of collectives: `python -m tests.npu.hccl_ranks RANK RANKS PORT ENDING`.

Runs every collective of torch.distributed over the simulated HCCL and prints "passed"; what is wrong raises. The
ending is a failure that all ranks must notice: "leave" (the last rank ends) or "differ" (counts do not match).
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 - makes the device and the backend known

RANK, RANKS, PORT = (int(word) for word in sys.argv[1:4])
ENDING = sys.argv[4]
# more than one round through the shared memory
LONG = 700_001


def _ones(count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), value, dtype=dtype, device="npu")


def reductions() -> None:
    """Sums in every type, the other operations, one root, long and odd sizes."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8):
        x = (torch.arange(7) + RANK).to(dtype).npu()
        dist.all_reduce(x)
        assert x.tolist() == [RANKS * i + RANKS * (RANKS - 1) // 2 for i in range(7)]
    factorial = 1.0
    for rank in range(RANKS):
        factorial *= rank + 1
    for op, expected in (
        (dist.ReduceOp.MAX, float(RANKS)),
        (dist.ReduceOp.MIN, 1.0),
        (dist.ReduceOp.PRODUCT, factorial),
    ):
        x = _ones(LONG if op == dist.ReduceOp.MAX else 5, RANK + 1.0)
        dist.all_reduce(x, op=op)
        assert bool((x == expected).all())
    x = _ones(3, 1)
    dist.reduce(x, 0)
    assert RANK != 0 or x.tolist() == [RANKS] * 3


def gathers() -> None:
    """Equal and unequal parts to all, and parts of a sum."""
    whole = torch.empty(RANKS * 5, device="npu")
    dist.all_gather_into_tensor(whole, _ones(5, RANK))
    assert whole.tolist() == [float(rank) for rank in range(RANKS) for _ in range(5)]
    parts = [torch.empty(rank + 1, device="npu") for rank in range(RANKS)]
    dist.all_gather(parts, _ones(RANK + 1, RANK))
    assert [part.tolist() for part in parts] == [[float(rank)] * (rank + 1) for rank in range(RANKS)]
    part = torch.empty(LONG // RANKS, dtype=torch.bfloat16, device="npu")
    dist.reduce_scatter_tensor(part, _ones(LONG // RANKS * RANKS, 2, torch.bfloat16))
    assert bool((part == 2 * RANKS).all())
    objects: list[object] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": rank} for rank in range(RANKS)]


def from_one() -> None:
    """What one rank has goes to the others, whole or in parts."""
    x = _ones(6, RANK, torch.int32)
    dist.broadcast(x, 1)
    assert x.tolist() == [1] * 6
    part = torch.empty(2, device="npu")
    dist.scatter(part, [_ones(2, rank) for rank in range(RANKS)] if RANK == 0 else None, src=0)
    assert part.tolist() == [RANK] * 2


def all_to_all() -> None:
    """Every rank to every other, equal and unequal parts."""
    got = torch.empty(2 * RANKS, device="npu")
    dist.all_to_all_single(got, (torch.arange(2 * RANKS) + 100 * RANK).float().npu())
    assert got.tolist() == [100.0 * rank + 2 * RANK + i for rank in range(RANKS) for i in range(2)]
    sizes = [rank + 1 for rank in range(RANKS)]
    got = torch.empty(sum(sizes), device="npu")
    dist.all_to_all_single(got, _ones(RANKS * (RANK + 1), RANK), sizes, [RANK + 1] * RANKS)
    assert got.tolist() == [float(rank) for rank in range(RANKS) for _ in range(rank + 1)]


def messages() -> None:
    """From rank 0 to 1, and around the ring at the same time."""
    numbers = torch.arange(LONG, device="npu")
    if RANK == 0:
        dist.send(numbers, 1)
    if RANK == 1:
        got = torch.empty_like(numbers)
        dist.recv(got, 0)
        assert torch.equal(got, numbers)
    before = (RANK - 1) % RANKS
    got = torch.empty(200_000, device="npu")
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, _ones(200_000, RANK), (RANK + 1) % RANKS),
            dist.P2POp(dist.irecv, got, before),
        ]
    )
    for work in works:
        work.wait()
    assert bool((got == before).all())


def groups_and_graphs() -> None:
    """A group of some ranks, and a collective that a graph replays."""
    pair = dist.new_group([0, 1])
    if RANK < 2:
        x = _ones(3, 1)
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [2] * 3
    dist.barrier()
    x = _ones(4, 0)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, capture_error_mode="relaxed"):
        y = x + 1
        dist.all_reduce(y)
    for step in range(3):
        x.fill_(step + RANK)
        graph.replay()
        assert y.tolist() == [float(RANKS * (step + 1) + RANKS * (RANKS - 1) // 2)] * 4


def ending() -> None:
    """A failure: every rank that is left gets an error instead of waiting for ever."""
    if ENDING == "leave" and RANK == RANKS - 1:
        return
    try:
        dist.all_reduce(_ones(3 + RANK if ENDING == "differ" else 3, 1))
        torch.npu.synchronize()
    except RuntimeError:
        return
    raise AssertionError("the collective did not fail")


torch.npu.set_device(RANK)
dist.init_process_group(
    "hccl",
    init_method=f"tcp://127.0.0.1:{PORT}",
    rank=RANK,
    world_size=RANKS,
    timeout=datetime.timedelta(seconds=60),
)
for check in (reductions, gathers, from_one, all_to_all, messages, groups_and_graphs, ending):
    check()
    print(check.__name__, "passed", flush=True)
# a communicator that has failed cannot be left in order
os._exit(0)
