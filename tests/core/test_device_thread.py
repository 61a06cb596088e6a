"""The thread in which a worker computes: order of calls, errors, and its end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from ascend_vllm.errors import EngineDeadError
from ascend_vllm.executor.device_thread import CallersThread, ComputeThread, DeviceThread

TIMEOUT_S = 30.0


@pytest.mark.parametrize("kind", [CallersThread, DeviceThread])
def test_calls_are_made_in_order_in_one_thread(kind: type[ComputeThread]) -> None:
    thread = kind()
    calls: list[tuple[int, int]] = []
    ended: list[int] = []

    def note(number: int) -> int:
        calls.append((number, threading.get_ident()))
        return number * 2

    futures = [thread.submit(note, number) for number in range(100)]
    assert [future.result(TIMEOUT_S) for future in futures] == [2 * number for number in range(100)]
    thread.close(lambda: ended.append(threading.get_ident()))
    assert [number for number, _ in calls] == list(range(100))
    assert {ident for _, ident in calls} == set(ended)
    assert (threading.get_ident() in ended) == (kind is CallersThread)


@pytest.mark.parametrize("kind", [CallersThread, DeviceThread])
def test_an_error_is_set_on_its_future_only(kind: type[ComputeThread]) -> None:
    thread = kind()
    failing, fine = thread.submit(int, "no number"), thread.submit(int, "7")
    with pytest.raises(ValueError, match="no number"):
        failing.result(TIMEOUT_S)
    assert fine.result(TIMEOUT_S) == 7
    thread.close(lambda: None)


def test_not_even_an_exit_ends_the_thread() -> None:
    thread = DeviceThread()
    with pytest.raises(SystemExit):
        thread.submit(sys.exit, 3).result(TIMEOUT_S)
    assert thread.submit(int, "7").result(TIMEOUT_S) == 7
    thread.close(lambda: None)


def test_closing_finishes_the_current_call_and_fails_the_others() -> None:
    thread = DeviceThread(TIMEOUT_S)
    begun, may_end = threading.Event(), threading.Event()
    log: list[str] = []

    def slow() -> str:
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        log.append("slow")
        return "done"

    running, waiting, never = thread.submit(slow), thread.submit(int, "1"), thread.submit(log.append, "never")
    assert begun.wait(TIMEOUT_S)
    assert not running.done()
    closer = threading.Thread(target=thread.close, args=(lambda: log.append("last"),))
    closer.start()
    # calls are accepted until closing has begun, but not made
    late = [thread.submit(log.append, "never")]
    while not late[-1].done():
        late.append(thread.submit(log.append, "never"))
    assert waiting.cancel()
    may_end.set()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert running.result(0) == "done"
    for future in (never, *late, thread.submit(log.append, "never")):
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result(0)
    assert log == ["slow", "last"]


def test_closing_raises_what_the_last_call_raised() -> None:
    thread = DeviceThread()

    def fail() -> None:
        raise RuntimeError("cannot let go")

    with pytest.raises(RuntimeError, match="cannot let go"):
        thread.close(fail)


def test_a_cancelled_call_is_not_made() -> None:
    thread = DeviceThread()
    may_end = threading.Event()
    first, second, third = thread.submit(may_end.wait, TIMEOUT_S), thread.submit(int, "2"), thread.submit(int, "3")
    assert second.cancel()
    may_end.set()
    assert third.result(TIMEOUT_S) == 3
    assert first.result(0)
    assert second.cancelled()
    thread.close(lambda: None)


def test_an_idle_thread_takes_no_processor_time() -> None:
    thread = DeviceThread()
    thread.submit(int, "1").result(TIMEOUT_S)
    clock = time.pthread_getcpuclockid(thread.submit(threading.get_ident).result(TIMEOUT_S))
    before = time.clock_gettime(clock)
    threading.Event().wait(0.1)
    assert time.clock_gettime(clock) - before < 0.01
    thread.close(lambda: None)


HANGING = """
import threading
from ascend_vllm.executor.device_thread import DeviceThread

thread = DeviceThread(grace_s=0.05)
begun = threading.Event()

def hang():
    begun.set()
    threading.Event().wait()

thread.submit(hang)
assert begun.wait(10)
thread.close(lambda: print("the last call"))
print("end of main")
"""


def test_a_process_whose_step_hangs_can_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "end of main"
    assert "the last call" not in done.stdout
    assert "has not ended for 0.05 s" in done.stdout + done.stderr
