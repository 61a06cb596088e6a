"""Limited processes themselves: what they may do, what ends them, and what is said of that."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from ascend_vllm.sandbox.child import Limits
from ascend_vllm.sandbox.pool import Job, LimitExceededError, Pool, ProcessBrokenError, TooLateError
from tests.server import wait_until


@contextlib.contextmanager
def pool_of(size: int = 1, setup: bytes = b"", **limits: Any) -> Iterator[Pool]:
    """A pool of which no process is left in the end."""
    usual: dict[str, Any] = {"wall_s": 30.0, "cpu_s": 5, "memory_bytes": 256 << 20}
    pool = Pool(
        "tests", "tests.sandbox.jobs:prepare", Limits(**usual | limits), size, max_answer_bytes=1000, setup=setup
    )
    seen: set[int] = set()
    try:
        yield pool
        seen.update(pool.pids)
    finally:
        pool.close()
    assert not any(map(psutil.pid_exists, seen))


def test_a_warm_process_takes_one_job_after_another() -> None:
    with pool_of(size=2, setup=b"a setup ") as pool:
        assert pool.pids == []
        first = json.loads(pool.run(Job(), b"environment"))
        assert len(pool.pids) == 2
        assert json.loads(pool.run(Job(), b"environment")) == first
        # a session of its own, not nice
        assert first[:2] == [first[0], first[0]] and first[0] in pool.pids
        assert first[2] == os.nice(0)
        large = os.urandom(500) * 2
        assert pool.run(Job(), b"echo " + large[:900]) == b"a setup " + large[:900]


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        (b"exit 7", ProcessBrokenError, r"broke its process \(exit code 7\)"),
        (b"exit 3", LimitExceededError, "needed more than 256 MiB of memory"),
        (b"keep 1000000000", LimitExceededError, "needed more than 256 MiB of memory"),
        (b"abort", LimitExceededError, "ended its process, as libraries do when they would need more than 256 MiB"),
        # a limit on the size of files: there are none to write
        (b"write", ProcessBrokenError, r"broke its process \(exit code -?\d+\)"),
        (b"answer 1001", ProcessBrokenError, "broke its process"),
    ],
)
def test_what_ends_a_process(job: bytes, kind: type[Exception], text: str) -> None:
    with pool_of() as pool:
        pool.run(Job(), b"echo")
        (pid,) = pool.pids
        with pytest.raises(kind, match=f"^{text}"):
            pool.run(Job(), job)
        # it is replaced at once
        assert pool.pids != [pid] and len(pool.pids) == 1
        assert pool.run(Job(), b"answer 1000") == bytes(1000)


@pytest.mark.parametrize("job", [b"sleep 60", b"stall"])
def test_the_time_of_a_job_is_up(job: bytes) -> None:
    with pool_of(wall_s=0.2) as pool:
        with pytest.raises(TooLateError, match=r"^took longer than 0\.2 s"):
            pool.run(Job(), job)
        assert pool.run(Job(), b"echo x") == b"x"


def test_a_process_that_keeps_memory_is_replaced() -> None:
    with pool_of() as pool:
        assert pool.run(Job(), b"keep 1000") == b"done"
        (pid,) = pool.pids
        assert pool.run(Job(), b"keep 100000000") == b"done"
        assert pool.pids != [pid] and not psutil.pid_exists(pid)


def test_a_process_that_does_not_start() -> None:
    with pool_of(setup=b"broken") as pool, pytest.raises(RuntimeError, match="ended with code 1 when it started"):
        pool.run(Job(), b"echo")


def test_a_job_is_given_up_before_it_begins_and_a_closed_pool_takes_none() -> None:
    job = Job()
    job.give_up()
    with pool_of() as pool:
        assert pool.run(Job(), b"echo x") == b"x"
        pids = pool.pids
        with pytest.raises(concurrent.futures.CancelledError):
            pool.run(job, b"sleep 60")
        assert pool.pids == pids
    with pytest.raises(concurrent.futures.CancelledError):
        pool.run(Job(), b"echo")


def test_processes_end_with_the_thread_that_started_them() -> None:
    """And so with the server, however it ends."""
    with pool_of() as pool:
        thread = threading.Thread(target=pool.run, args=(Job(), b"echo"))
        thread.start()
        thread.join()
        (pid,) = pool.pids
        assert wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        assert pool.run(Job(), b"echo x") == b"x"
