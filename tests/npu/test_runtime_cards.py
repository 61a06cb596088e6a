"""Processes that share cards: their memory, until they end, and notifies."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest

from tests.npu import acl
from tests.npu.processes import last_line, run

TOTAL = 64 << 20
# for each line that it is sent: allocates so many MiB, or frees them all; answers with the code, and what is left
HOLDER = """
import ctypes, sys
from tests.npu import acl
acl.call("aclrtSetDevice", 0)
held = []
for line in sys.stdin:
    pointer = acl.Handle()
    answer = 0
    if int(line):
        answer = acl.code("aclrtMalloc", ctypes.byref(pointer), int(line) << 20, 0)
        if answer == 0:
            held.append(pointer)
    else:
        for pointer in held:
            acl.call("aclrtFree", pointer)
        held.clear()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    acl.call("aclrtGetMemInfo", 0, ctypes.byref(free), ctypes.byref(total))
    print(answer, free.value >> 20, flush=True)
"""


class Holder:
    """A process with memory of a card."""

    def __init__(self, account: pathlib.Path, card: int, environment: dict[str, str]) -> None:
        variables = {"ASCEND_SIM_CARDS": str(account), "ASCEND_RT_VISIBLE_DEVICES": str(card)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            env=environment | variables | {"ASCEND_SIM_MEMORY": str(TOTAL)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, mebibytes: int) -> tuple[int, int]:
        """Allocates, or frees all of it with 0; returns the code, and the free memory in MiB."""
        pipes: tuple[IO[str], Any] = (self.process.stdin, self.process.stdout)  # type: ignore[assignment]
        pipes[0].write(f"{mebibytes}\n")
        pipes[0].flush()
        answer, free = pipes[1].readline().split()
        return int(answer), int(free)

    def kill(self) -> None:
        """SIGKILL: it cannot give anything back."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[[int], Holder]]:
    """Starts processes on a card, which share one account."""
    with contextlib.ExitStack() as stack:

        def on(card: int) -> Holder:
            holder = Holder(tmp_path / "cards", card, dict(os.environ))
            stack.callback(holder.kill)
            return holder

        yield on


def test_processes_on_a_card_share_its_memory(start: Callable[[int], Holder]) -> None:
    first, second, other = start(0), start(0), start(1)
    assert first.ask(40) == (0, 24)
    assert second.ask(30) == (acl.OUT_OF_MEMORY, 24)
    assert second.ask(20) == (0, 4)
    assert first.ask(8) == (acl.OUT_OF_MEMORY, 4)
    assert other.ask(60) == (0, 4)
    assert first.ask(0) == (0, 44)
    assert second.ask(44) == (0, 0)


def test_the_memory_of_a_killed_process_is_free_again(start: Callable[[int], Holder]) -> None:
    first, second = start(0), start(0)
    assert first.ask(60) == (0, 4)
    first.kill()
    assert second.ask(50) == (0, 14)
    # and its row is another's
    third = start(0)
    assert third.ask(20) == (acl.OUT_OF_MEMORY, 14)
    assert third.ask(10) == (0, 4)


def test_a_fork_has_an_account_of_its_own(start: Callable[[int], Holder], tmp_path: pathlib.Path) -> None:
    script = """
import ctypes, os
from tests.npu import acl
acl.call("aclrtSetDevice", 0)
acl.malloc(40 << 20)
def free():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    acl.call("aclrtGetMemInfo", 0, ctypes.byref(free), ctypes.byref(total))
    return free.value >> 20
child = os.fork()
if child == 0:
    os._exit(0 if free() < 24 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), free())
"""
    variables = {"ASCEND_SIM_CARDS": str(tmp_path / "cards"), "ASCEND_SIM_MEMORY": str(TOTAL)}
    assert last_line(run(sys.executable, "-c", script, **variables)) == "0 24"


def test_graphs_take_a_notify_for_each_wait_between_streams() -> None:
    script = """
import torch, torch_npu
side = torch.npu.Stream()
x = torch.ones(4).npu()
def capture(num_waits):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(num_waits // 2):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                x.add_(1)
            torch.npu.current_stream().wait_stream(side)
    return graph
kept = capture(4)
del kept
kept = capture(6)
try:
    capture(4)
except RuntimeError:
    print("refused")
"""
    done = run(sys.executable, "-W", "ignore", "-c", script, ASCEND_SIM_NOTIFIES="8")
    assert last_line(done) == "refused"
    assert "4 notifies are needed, and 6 of the device's 8 are in use, by graphs and communicators" in done.stderr
