"""Streams, events and callbacks: the order they keep, and the misuse they refuse."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.npu import acl

Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(autouse=True)
def _device() -> None:
    torch.npu.set_device(0)


def test_streams_wait_for_each_others_events() -> None:
    side = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    x = torch.zeros(4, device="npu")
    start.record()
    with torch.npu.stream(side):
        side.wait_event(start)
        x.add_(1)
        end.record(side)
    torch.npu.current_stream().wait_event(end)
    x.mul_(3)
    torch.npu.synchronize()
    assert x.cpu().tolist() == [3.0] * 4
    assert end.query() and side.query() and start.elapsed_time(end) > 0


def test_times_need_events_that_take_them() -> None:
    plain, timed = acl.event(), acl.event(acl.EVENT_TIME_LINE)
    milliseconds = ctypes.c_float()
    for recorded in (plain, timed):
        acl.call("aclrtRecordEvent", recorded, None)
    wrong = acl.code("aclrtEventElapsedTime", ctypes.byref(milliseconds), timed, plain)
    assert wrong == acl.TIMESTAMP_INVALID and "made without timing" in acl.message()
    never = acl.event(acl.EVENT_TIME_LINE)
    assert acl.code("aclrtEventElapsedTime", ctypes.byref(milliseconds), timed, never) == acl.TIMESTAMP_INVALID
    for event in (plain, timed, never):
        acl.call("aclrtDestroyEvent", event)


def test_unknown_handles_are_refused() -> None:
    stream, event = acl.stream(), acl.event()
    acl.call("aclrtDestroyStream", stream)
    acl.call("aclrtDestroyEvent", event)
    assert acl.code("aclrtSynchronizeStream", stream) == acl.UNKNOWN_STREAM
    assert acl.code("aclrtDestroyStream", stream) == acl.UNKNOWN_STREAM
    assert acl.code("aclrtRecordEvent", event, None) == acl.INVALID_HANDLE
    assert acl.code("aclrtSetDevice", 2) == acl.INVALID_DEVICE and "there is no device 2" in acl.message()


def test_nothing_waits_for_an_event_that_was_never_recorded() -> None:
    event = acl.event()
    assert acl.code("aclrtStreamWaitEvent", None, event) == acl.PARAM_INVALID
    assert "never recorded" in acl.message()
    acl.call("aclrtDestroyEvent", event)


def test_an_external_event_holds_a_stream_up_until_it_is_recorded() -> None:
    waiting, other, event = acl.stream(), acl.stream(), acl.event(acl.EVENT_EXTERNAL)
    pointer = acl.malloc(4)
    acl.write(pointer, b"\0\0\0\0")
    acl.call("aclrtStreamWaitEvent", waiting, event)
    assert acl.fill(pointer, 7, 4, waiting) == 0
    status = ctypes.c_int()
    acl.call("aclrtStreamQuery", waiting, ctypes.byref(status))
    assert status.value == 1 and acl.read(pointer, 4) == b"\0\0\0\0"
    assert acl.code("aclrtSynchronizeStreamWithTimeout", waiting, 20) == acl.SYNC_TIMEOUT
    assert "never recorded" in acl.message()
    assert acl.code("aclrtDestroyStream", waiting) == acl.STREAM_NOT_COMPLETE
    acl.call("aclrtRecordEvent", event, other)
    acl.call("aclrtSynchronizeStream", waiting)
    assert acl.read(pointer, 4) == b"\7\7\7\7"
    for name, handle in (("Stream", waiting), ("Stream", other), ("Event", event)):
        acl.call(f"aclrtDestroy{name}", handle)
    acl.call("aclrtFree", pointer)


def test_callbacks_run_in_their_place() -> None:
    stream, pointer, seen = acl.stream(), acl.malloc(1), []
    callback = Callback(lambda _: seen.append(acl.read(pointer, 1)))
    for value in (1, 2):
        assert acl.fill(pointer, value, 1, stream) == 0
        acl.call("aclrtLaunchHostFunc", stream, callback, None)
    acl.call("aclrtSynchronizeStream", stream)
    assert seen == [b"\1", b"\2"]
    acl.call("aclrtDestroyStream", stream)
    acl.call("aclrtFree", pointer)
