"""One rank of `collectives`: finds out one thing after another, and appends a line of JSON for each to a file.

python -m ascend_vllm.tools.doctor.kit.steps.rank DIRECTORY RANK COUNT
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ascend_vllm.platforms.npu import NpuPlatform
from ascend_vllm.tools.doctor.kit.session import Session

# rows and width of what is added up, as in a layer of a model
_TOKENS, _WIDTH = 64, 4096
_REPEATS = 20
# in bytes, on a card and on the simulator
_SIZES = ((64 << 10, 1 << 20, 64 << 20), (64 << 10, 1 << 20, 1 << 21))
_TIMEOUT = datetime.timedelta(seconds=60)


def main(directory: pathlib.Path, rank: int, count: int) -> None:
    """Runs all findings."""
    with (directory / f"{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
        me: _Rank | None = None
        for finding, run in FINDINGS.items():
            told: dict[str, Any] = {"finding": finding, "error": "", "wrong": "", "numbers": {}}
            try:
                me = me or _connect(directory, rank, count)
                told |= run(me)
            except Exception as error:
                told["error"] = f"{type(error).__name__}: {error}"
            file.write(json.dumps(told) + "\n")
            if told["error"]:
                # the other ranks do not come to the next finding
                return


@dataclasses.dataclass(frozen=True)
class _Rank:
    session: Session
    platform: NpuPlatform
    # of torch.distributed
    group: Any
    rank: int
    count: int

    def numbers(self, rank: int) -> torch.Tensor:
        """What a rank adds to sums, [_TOKENS, _WIDTH] bfloat16 on the host."""
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(_TOKENS, _WIDTH, generator=generator).bfloat16()

    def add(self, tensor: torch.Tensor) -> None:
        """All-reduce, in place."""
        dist.all_reduce(tensor, group=self.group)

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.npu.synchronize()  # type: ignore[attr-defined]  # defined by torch_npu

    def seconds_of(self, call: Callable[[], Any], repeats: int) -> float:
        """Of one of several calls."""
        call()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        self.synchronize()
        return (time.perf_counter() - begin) / repeats


def _connect(directory: pathlib.Path, rank: int, count: int) -> _Rank:
    session = Session()
    platform = session.bind(rank, count)
    store = FileStore(str(directory / "store"), count)
    (group,) = platform.process_groups(store, rank, [[list(range(count))]], _TIMEOUT)
    return _Rank(session, platform, group, rank, count)


def _sums(me: _Rank) -> dict[str, Any]:
    """Bitwise the same in every repeat, and, which the parent compares, on every rank."""
    mine = me.numbers(me.rank).to("npu")
    sums = []
    for _ in range(_REPEATS):
        total = mine.clone()
        me.add(total)
        sums.append(total.cpu())
    truth = torch.stack([me.numbers(other).float() for other in range(me.count)]).sum(0)
    error = float((sums[0].float() - truth).abs().max())
    # each addition may be rounded
    allowed = me.count * float(truth.abs().max()) * torch.finfo(torch.bfloat16).eps
    wrong = "" if error <= allowed else f"the error is {error:.3g}, {allowed:.3g} are allowed"
    if not all(torch.equal(total, sums[0]) for total in sums):
        wrong = "repeats have different sums"
    bits = hashlib.sha256(sums[0].view(torch.int16).numpy().tobytes()).hexdigest()[:16]
    return {"wrong": wrong, "bits": bits, "numbers": {"error": error, "allowed": allowed}}


def _bandwidth(me: _Rank) -> dict[str, Any]:
    """Bytes of a rank's tensor by the time of its sum."""
    numbers = {}
    for size in me.session.size(*_SIZES):
        tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device="npu")
        seconds = me.seconds_of(functools.partial(me.add, tensor), me.session.size(20, 2))
        numbers[f"{size >> 10}_KiB_us"] = seconds * 1e6
        numbers[f"{size >> 10}_KiB_gb_per_s"] = size / seconds / 1e9
    return {"numbers": numbers}


def _graph(me: _Rank) -> dict[str, Any]:
    """A captured sum, replayed with other numbers."""
    mine = me.numbers(me.rank).to("npu")
    total = torch.empty_like(mine)

    def work() -> None:
        total.copy_(mine)
        me.add(total)

    work()
    replay = me.platform.make_graph_recorder().capture(work).graph.replay
    wrong = ""
    for factor in (1, 2, 4):
        mine.copy_(me.numbers(me.rank).to("npu") * factor)
        expected = mine.clone()
        me.add(expected)
        replay()
        me.synchronize()
        if not torch.equal(total, expected):
            wrong = "a replay has other sums than a call"
    return {"wrong": wrong, "numbers": {"time_us": me.seconds_of(replay, 3) * 1e6}}


FINDINGS: dict[str, Callable[[_Rank], dict[str, Any]]] = {
    "equal sums": _sums,
    "bandwidth": _bandwidth,
    "sums in graphs": _graph,
}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    # a communicator that has failed cannot be left in order
    os._exit(0)
