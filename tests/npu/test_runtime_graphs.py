"""Capture and replay: streams that join a graph, updates of task groups, and what may not be captured."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.npu import acl
from tests.npu.processes import run


@pytest.fixture(autouse=True)
def _default_stream() -> Iterator[None]:
    """torch_npu does not leave the stream of a failed capture, and hands out 32 streams in turns: a later test would
    get the one that its replays are on.
    """
    torch.npu.set_device(0)
    with torch.npu.stream(torch.npu.default_stream()):
        yield


@pytest.fixture
def memory() -> Iterator[acl.Handle]:
    """Eight bytes of the device, all 0."""
    pointer = acl.malloc(8)
    acl.write(pointer, bytes(8))
    yield pointer
    acl.call("aclrtFree", pointer)


@pytest.fixture
def streams() -> Iterator[tuple[acl.Handle, acl.Handle]]:
    """Two streams, neither of them the default one."""
    pair = acl.stream(), acl.stream()
    yield pair
    for stream in pair:
        acl.call("aclrtDestroyStream", stream)


def begin(stream: acl.Handle, mode: int = acl.GLOBAL) -> None:
    acl.call("aclmdlRICaptureBegin", stream, mode)


def end(stream: acl.Handle) -> acl.Handle:
    graph = acl.Handle()
    acl.call("aclmdlRICaptureEnd", stream, ctypes.byref(graph))
    return graph


def broken_end(stream: acl.Handle) -> int:
    return acl.code("aclmdlRICaptureEnd", stream, ctypes.byref(acl.Handle()))


def replay(graph: acl.Handle, stream: acl.Handle) -> None:
    acl.call("aclmdlRIExecuteAsync", graph, stream)
    acl.call("aclrtSynchronizeStream", stream)


def test_a_replay_computes_anew_from_the_same_places() -> None:
    x = torch.zeros(4).to("npu")
    side = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            doubled = x + x
        torch.npu.current_stream().wait_stream(side)
        y = doubled + 1
    assert y.cpu().isnan().all(), "a capture computes nothing"
    for value in (3.0, -1.0):
        x.copy_(torch.full((4,), value))
        graph.replay()
        assert y.cpu().tolist() == [2 * value + 1] * 4
    graph.reset()


def test_reading_a_result_breaks_a_capture_and_nothing_else() -> None:
    x = torch.ones(2).to("npu")
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match=r"10[0-9]{4}|507903"), torch.npu.graph(graph):
        (x + 1).cpu()
    assert (x + 1).cpu().tolist() == [2.0, 2.0]


def test_what_breaks_a_capture(memory: acl.Handle, streams: tuple[acl.Handle, acl.Handle]) -> None:
    stream, other = streams
    buffer = ctypes.create_string_buffer(8)
    calls = {
        "aclrtSynchronizeStream": (acl.STREAM_CAPTURED, stream),
        "aclrtSynchronizeDevice": (acl.NOT_ALLOWED_WHILE_CAPTURING,),
        "aclrtMemcpy": (acl.NOT_ALLOWED_WHILE_CAPTURING, memory, 8, buffer, 8, acl.HOST_TO_DEVICE),
        "aclrtMemset": (acl.NOT_ALLOWED_WHILE_CAPTURING, memory, 8, 0, 8),
        "aclrtMemcpyAsync": (acl.NOT_ALLOWED_WHILE_CAPTURING, memory, 8, buffer, 8, acl.HOST_TO_DEVICE, other),
    }
    for name, (wanted, *arguments) in calls.items():
        begin(stream)
        assert acl.code(name, *arguments) == wanted, name
        assert acl.fill(memory, 1, 8, stream) == acl.CAPTURE_INVALIDATED
        assert broken_end(stream) == acl.CAPTURE_INVALIDATED
    assert acl.read(memory, 8) == bytes(8)


def test_modes_say_which_threads_may_copy(memory: acl.Handle, streams: tuple[acl.Handle, acl.Handle]) -> None:
    stream, other = streams
    buffer = ctypes.create_string_buffer(8)
    begin(stream, acl.RELAXED)
    acl.call("aclrtMemcpy", memory, 8, buffer, 8, acl.HOST_TO_DEVICE)
    wrong = acl.code("aclrtMemcpyAsync", memory, 8, buffer, 8, acl.HOST_TO_DEVICE, stream)
    assert wrong == acl.PAGEABLE_COPY_IN_CAPTURE and "pinned memory" in acl.message()
    acl.call("aclmdlRIDestroy", end(stream))
    begin(stream)
    mode = ctypes.c_int(acl.RELAXED)
    acl.call("aclmdlRICaptureThreadExchangeMode", ctypes.byref(mode))
    assert mode.value == acl.GLOBAL
    acl.call("aclrtMemcpyAsync", memory, 8, buffer, 8, acl.HOST_TO_DEVICE, other)
    acl.call("aclmdlRICaptureThreadExchangeMode", ctypes.byref(mode))
    acl.call("aclmdlRIDestroy", end(stream))


def test_streams_join_by_events_and_must_be_joined_again(
    memory: acl.Handle, streams: tuple[acl.Handle, acl.Handle]
) -> None:
    stream, other = streams
    fork, join, outside = acl.event(), acl.event(), acl.event()
    acl.call("aclrtRecordEvent", outside, other)
    for joined in (False, True):
        begin(stream)
        acl.call("aclrtRecordEvent", fork, stream)
        acl.call("aclrtStreamWaitEvent", other, fork)
        assert acl.fill(memory, 5, 8, other) == 0
        acl.call("aclrtRecordEvent", join, other)
        assert broken_end(other) == acl.CAPTURE_UNMATCHED
        assert acl.code("aclrtDestroyStream", other) == acl.STREAM_CAPTURED
        assert acl.code("aclrtStreamWaitEvent", stream, outside) == acl.CAPTURE_DEPENDENCY
        assert acl.code("aclrtSynchronizeEvent", join) == acl.EVENT_CAPTURED
        if not joined:
            assert broken_end(stream) == acl.STREAM_UNJOINED
            continue
        acl.call("aclrtStreamWaitEvent", stream, join)
        graph = end(stream)
        assert acl.read(memory, 8) == bytes(8)
        replay(graph, stream)
        assert acl.read(memory, 8) == b"\5" * 8
        acl.call("aclmdlRIDestroy", graph)
    assert acl.code("aclmdlRICaptureBegin", None, acl.GLOBAL) == acl.DEFAULT_STREAM_CAPTURED
    for event in (fork, join, outside):
        acl.call("aclrtDestroyEvent", event)


def test_a_task_group_is_updated_between_replays() -> None:
    x, y = torch.ones(4).to("npu"), torch.zeros(4).to("npu")
    updates = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        torch.mul(x, 2.0, out=y)
        group = torch.npu.graph_task_group_end(stream)
        z = y + 1

    graph.replay()
    assert z.cpu().tolist() == [3.0] * 4
    with torch.npu.stream(updates):
        torch.npu.graph_task_update_begin(updates, group)
        torch.mul(x, 5.0, out=y)
        torch.npu.graph_task_update_end(updates)
    updates.synchronize()
    graph.replay()
    assert z.cpu().tolist() == [6.0] * 4
    torch.npu.graph_task_update_begin(updates, group)
    with pytest.raises(RuntimeError, match="brought 0 pieces of work where the group has 1"):
        torch.npu.graph_task_update_end(updates)


def operator(name: str, memory: acl.Handle, stream: acl.Handle) -> int:
    """Runs an operator that writes a float over each of the two places; its code."""
    library = ctypes.CDLL("libopapi.so")
    library.aclCreateTensor.restype = ctypes.c_void_p
    shape, strides = (ctypes.c_int64 * 1)(2), (ctypes.c_int64 * 1)(1)
    count, nothing = ctypes.c_uint64(1), ctypes.c_int64(0)
    tensor = acl.Handle(library.aclCreateTensor(shape, count, 0, strides, nothing, 2, shape, count, memory))
    size, executor = ctypes.c_uint64(), acl.Handle()
    planned = library[f"{name}GetWorkspaceSize"](tensor, ctypes.byref(size), ctypes.byref(executor))
    assert planned == 0, acl.message()
    answer = library[name](None, size, executor, stream)
    library.aclDestroyTensor(tensor)
    return int(answer)


def test_an_update_brings_the_operators_that_the_group_has(
    memory: acl.Handle, streams: tuple[acl.Handle, acl.Handle]
) -> None:
    stream, other = streams
    group = acl.Handle()
    begin(stream)
    acl.call("aclmdlRICaptureTaskGrpBegin", stream)
    assert operator("aclnnInplaceOne", memory, stream) == 0
    acl.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
    graph = end(stream)
    acl.call("aclmdlRICaptureTaskUpdateBegin", other, group)
    assert acl.code("aclmdlRICaptureTaskUpdateBegin", other, group) == acl.TASK_GROUP_STATUS
    assert operator("aclnnInplaceZero", memory, other) == acl.TASK_GROUP_STATUS
    assert "brings aclnnInplaceZero where it has aclnnInplaceOne" in acl.message()
    assert operator("aclnnInplaceOne", memory, other) == 0
    assert operator("aclnnInplaceOne", memory, other) == acl.TASK_GROUP_STATUS
    assert "more work than the group has" in acl.message()
    acl.call("aclmdlRICaptureTaskUpdateEnd", other)
    assert acl.read(memory, 8) == bytes(8), "an update runs nothing"
    replay(graph, stream)
    assert acl.read(memory, 8) == b"\0\0\x80\x3f" * 2
    acl.call("aclmdlRIDestroy", graph)
    assert acl.code("aclmdlRICaptureTaskUpdateBegin", other, group) == acl.INVALID_HANDLE


def test_a_replay_waits_for_the_update_that_comes_after_it() -> None:
    """The order of a server: replay, then update what the next attention needs, then let the replay go on."""
    x, y = torch.ones(4).to("npu"), torch.zeros(4).to("npu")
    updates, event = torch.npu.Stream(), torch.npu.ExternalEvent()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.mul(x, 2.0, out=y)
        group = torch.npu.graph_task_group_end(stream)
    for factor in (3.0, 4.0):
        graph.replay()
        with torch.npu.stream(updates):
            torch.npu.graph_task_update_begin(updates, group)
            torch.mul(x, factor, out=y)
            torch.npu.graph_task_update_end(updates)
            event.record(updates)
        torch.npu.synchronize()
        assert y.cpu().tolist() == [factor] * 4


WRONG_ORDER = """
import sys, torch, torch_npu
torch.npu.set_device(0)
x, y = torch.ones(4).to("npu"), torch.zeros(4).to("npu")
updates, event, busy = torch.npu.Stream(), torch.npu.ExternalEvent(), torch.npu.ExternalEvent()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    stream = torch.npu.current_stream()
    event.wait(stream)
    event.reset(stream)
    torch.npu.graph_task_group_begin(stream)
    torch.mul(x, 2.0, out=y)
    group = torch.npu.graph_task_group_end(stream)
if sys.argv[1] == "twice":
    busy.wait(torch.npu.current_stream())
for factor in (3.0, 4.0):
    graph.replay()
    if sys.argv[1] == "early":
        event.record(updates)
        break
    with torch.npu.stream(updates):
        torch.npu.graph_task_update_begin(updates, group)
        torch.mul(x, factor, out=y)
        torch.npu.graph_task_update_end(updates)
torch.npu.synchronize()
"""


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("early", "aclnnMuls would run with the arguments of an earlier replay"),
        ("twice", "aclnnMuls is updated again before the replay under way has run it"),
    ],
)
def test_updates_in_a_wrong_order_fail(order: str, message: str) -> None:
    """The event recorded before its update; an update that does not wait for the end of the last replay."""
    done = run(sys.executable, "-W", "ignore", "-c", WRONG_ORDER, order, ASCEND_SIM_SYNC_TIMEOUT="2")
    assert done.returncode != 0 and message in done.stderr


def test_task_groups_take_operators_of_a_live_capture(
    memory: acl.Handle, streams: tuple[acl.Handle, acl.Handle]
) -> None:
    stream, other = streams
    group = acl.Handle()
    assert acl.code("aclmdlRICaptureTaskGrpBegin", stream) == 107029
    begin(stream)
    assert acl.code("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group)) == acl.TASK_GROUP_STATUS
    acl.call("aclmdlRICaptureTaskGrpBegin", stream)
    assert acl.code("aclmdlRICaptureTaskGrpBegin", stream) == acl.TASK_GROUP_STATUS
    assert acl.fill(memory, 1, 8, stream) == acl.TASK_TYPE_NOT_SUPPORTED
    assert acl.code("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group)) == acl.TASK_GROUP_STATUS
    acl.call("aclmdlRIDestroy", end(stream))
    assert acl.code("aclmdlRICaptureTaskUpdateBegin", other, memory) == acl.INVALID_HANDLE


def test_a_suspended_graph_cannot_be_destroyed(memory: acl.Handle, streams: tuple[acl.Handle, acl.Handle]) -> None:
    stream, other = streams
    event = acl.event(acl.EVENT_EXTERNAL)
    begin(stream)
    acl.call("aclrtStreamWaitEvent", stream, event)
    assert acl.fill(memory, 9, 8, stream) == 0
    graph = end(stream)
    acl.call("aclmdlRIExecuteAsync", graph, stream)
    assert acl.read(memory, 8) == bytes(8)
    assert acl.code("aclmdlRIDestroy", graph) == acl.MODEL_RUNNING
    assert acl.code("aclrtDestroyEvent", event) == acl.PARAM_INVALID
    acl.call("aclrtRecordEvent", event, other)
    acl.call("aclrtSynchronizeStream", stream)
    assert acl.read(memory, 8) == b"\x09" * 8
    acl.call("aclmdlRIDestroy", graph)
    acl.call("aclrtDestroyEvent", event)
