"""The output thread makes text and events off the event loop. The engine is real; the test plays its core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
import zmq

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.tables.server import FrontendArgs
from ascend_vllm.engine.async_llm import AsyncLLM
from ascend_vllm.engine.output_processor import FairLock
from ascend_vllm.engine.sequence_state import SequenceState
from ascend_vllm.entrypoints.openai.app import build_app
from ascend_vllm.entrypoints.openai.protocol_chat import ChatChunkWriter
from ascend_vllm.entrypoints.openai.protocol_completion import CompletionChunkWriter
from ascend_vllm.errors import EngineDeadError
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams
from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats
from tests.engine.engine_for_tests import stop_and_play_ready
from tests.tiny_models import tiny_model

# the event loop of `shared_core`
in_its_loop = pytest.mark.asyncio(loop_scope="module")

# time per request in tests that interrupt a step; the GIL is released meanwhile
SLOW_S = 0.01
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def make_engine() -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        EngineArgs(
            model=tiny_model("qwen2-tied"),
            dtype="float32",
            max_model_len=128,
            num_gpu_blocks_override=32,
            block_size=16,
        )
    )


def output_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine-core-outputs"]


class PlayedCore:
    """Sends messages in place of an engine's core, whose process is stopped.

    Args:
        engine: not ready yet.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbound = self._context.socket(zmq.PULL)
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(engine._client._cores[0].process.outbound)

    async def start(self) -> None:
        """Makes the engine ready without its core."""
        stop_and_play_ready(self.engine._client, self._socket, self._inbound)
        await self.engine.ready()

    def stop_real_core(self) -> None:
        assert self.engine.core_pid is not None
        os.kill(self.engine.core_pid, signal.SIGSTOP)

    async def core_ids(self, request_id: str) -> list[str]:
        """Ids of a request's sequences in the core, once it is registered."""
        await wait_until(lambda: request_id in self.engine._output)
        return list(self.engine._output._requests[request_id].core_ids)

    def step(self, *outputs: EngineCoreOutput) -> None:
        message = EngineCoreOutputs(list(outputs), SchedulerStats(len(outputs), 0, 0.0, 0))
        self._socket.send(msgspec.msgpack.encode(message))

    def is_published(self, queue: Any) -> bool:
        """Whether all outputs of a request have been published."""
        return not self.engine._client._cores[0].receiver.is_busy and not queue._pending

    def is_read(self, queue: Any) -> bool:
        """Whether the reader has got all of them, and waits for more."""
        return self.is_published(queue) and not queue._published and queue._waiter is not None

    def close(self) -> None:
        self._context.destroy(linger=0)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def played() -> AsyncIterator[PlayedCore]:
    others = output_threads()
    engine = make_engine()
    core = PlayedCore(engine)
    try:
        await core.start()
        yield core
    finally:
        # it has loaded nothing, and would begin with it now
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.core_pid or 0, signal.SIGKILL)
        engine.shutdown()
        core.close()
    assert output_threads() == others


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_core() -> AsyncIterator[PlayedCore]:
    """For tests that leave its engine running and without requests."""
    async with played() as core:
        yield core


@pytest_asyncio.fixture(loop_scope="module")
async def core(shared_core: PlayedCore) -> AsyncIterator[PlayedCore]:
    """`shared_core`, which is checked afterwards."""
    yield shared_core
    engine = shared_core.engine
    await wait_until(lambda: not engine._client._cores[0].receiver.is_busy)
    assert engine.is_running
    assert engine._output.num_requests == engine._output.num_sequences == 0


@pytest.fixture
def update_threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Threads that detokenised."""
    threads: set[int] = set()
    update = SequenceState.update

    def watched(self: SequenceState, output: EngineCoreOutput) -> bool:
        threads.add(threading.get_ident())
        return update(self, output)

    monkeypatch.setattr(SequenceState, "update", watched)
    return threads


def delta(**options: Any) -> SamplingParams:
    return SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=64, ignore_eos=True, **options)


def text_of(output: RequestOutput) -> tuple[int, list[list[int]]]:
    """A shape that returns the thread it was called in."""
    return threading.get_ident(), [generated.token_ids for generated in output.outputs]


async def read(engine: AsyncLLM, request_id: str, shape: Callable[[RequestOutput], Any], **options: Any) -> list[Any]:
    """All outputs of a request, and its error, if any, as the last item."""
    items: list[Any] = []
    try:
        async for item in engine.generate_shaped("Hello!", delta(**options), request_id, shape):
            items.append(item)  # noqa: PERF401 - what came before an error counts
    except Exception as error:
        items.append(error)
    return items


@in_its_loop
async def test_a_step_becomes_text_and_takes_shape_in_the_output_thread(
    core: PlayedCore, update_threads: set[int]
) -> None:
    items: list[Any] = []

    async def consume() -> None:
        async for item in core.engine.generate_shaped("Hello!", delta(), "r", text_of):
            items.append(item)  # noqa: PERF401 - the test looks at it meanwhile

    task = asyncio.create_task(consume())
    (core_id,) = await core.core_ids("r")
    for number in range(5):
        core.step(EngineCoreOutput(core_id, [number]))
        await wait_until(lambda number=number: len(items) == number + 1)
    core.step(EngineCoreOutput(core_id, [5], finish_reason=FinishReason.LENGTH))
    await asyncio.wait_for(task, 30)
    (thread,) = output_threads()
    assert items == [(thread.ident, [[number]]) for number in range(6)]
    assert update_threads == {thread.ident}
    assert thread.ident != threading.get_ident()


@in_its_loop
@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_events_of_streams_are_made_in_the_output_thread(
    core: PlayedCore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChatChunkWriter if kind == "chat" else CompletionChunkWriter
    threads: list[int] = []

    def watched(method: Callable[..., bytes]) -> Callable[..., bytes]:
        def call(*args: Any) -> bytes:
            threads.append(threading.get_ident())
            return method(*args)

        return call

    for name in ("text_event", "event"):
        monkeypatch.setattr(writer, name, watched(getattr(writer, name)))
    app = build_app(core.engine, FrontendArgs(chat_template=TEMPLATE))
    body: dict[str, Any] = {"model": core.engine.config.model.model, "stream": True, "max_tokens": 8}
    if kind == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "/v1/completions", "Hello!"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = asyncio.create_task(http.post(path, json=body))
        await wait_until(lambda: core.engine._output.num_requests == 1)
        (request_id,) = core.engine.running_request_ids()
        (core_id,) = await core.core_ids(request_id)
        queue = core.engine._output.queue_of(request_id)
        for number in range(3):
            core.step(EngineCoreOutput(core_id, [40]))
            await wait_until(lambda number=number: len(threads) > number and core.is_read(queue))
        core.step(EngineCoreOutput(core_id, [41], finish_reason=FinishReason.LENGTH))
        response = await asyncio.wait_for(answer, 30)
    (thread,) = output_threads()
    assert threads == [thread.ident] * 4
    events = [event for event in response.text.split("\n\n") if event]
    assert len(events) == 5 + (kind == "chat")
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]


@in_its_loop
async def test_a_slow_reader_gets_merged_events_in_their_order(core: PlayedCore) -> None:
    """Shaped outputs are not merged; unshaped ones behind them are."""
    generator = core.engine.generate_shaped("Hello!", delta(), "r", text_of)
    first = asyncio.create_task(anext(generator))
    (core_id,) = await core.core_ids("r")
    core.step(EngineCoreOutput(core_id, [1]))
    (thread,) = output_threads()
    assert await first == (thread.ident, [[1]])
    queue = core.engine._output.queue_of("r")
    for token_id in (2, 3, 4, 5):
        core.step(EngineCoreOutput(core_id, [token_id]))
    await wait_until(lambda: queue._num_unshaped == 3 and core.is_published(queue))
    assert await anext(generator) == (thread.ident, [[2]])
    # queued unshaped; no later output may overtake it
    core.step(EngineCoreOutput(core_id, [6]))
    await wait_until(lambda: queue._num_unshaped == 4 and core.is_published(queue))
    assert await anext(generator) == (threading.get_ident(), [[3, 4, 5, 6]])
    # the reader has caught up
    following = asyncio.create_task(anext(generator))
    core.step(EngineCoreOutput(core_id, [7]))
    assert await following == (thread.ident, [[7]])
    await generator.aclose()
    assert core.engine._output.num_requests == 0


async def start_slow_step(
    core: PlayedCore, num_requests: int, finish: FinishReason | None
) -> list[asyncio.Task[Any]]:
    """Sends a slow step; returns when the first of its requests are done."""
    num_shaped = 0

    def slow(output: RequestOutput) -> tuple[int, list[list[int]]]:
        nonlocal num_shaped
        if threading.get_ident() != loop_thread:
            time.sleep(SLOW_S)
        num_shaped += 1
        return text_of(output)

    loop_thread = threading.get_ident()
    tasks = [asyncio.create_task(read(core.engine, f"r{i}", slow)) for i in range(num_requests)]
    ids = [(await core.core_ids(f"r{i}"))[0] for i in range(num_requests)]
    core.step(*(EngineCoreOutput(core_id, [7], finish_reason=finish) for core_id in ids))
    await wait_until(lambda: num_shaped > 3)
    return tasks


@in_its_loop
async def test_the_event_loop_goes_on_while_a_step_is_processed(core: PlayedCore) -> None:
    """An abort or a new request waits for the text of one request, not of the whole step."""
    engine = core.engine
    tasks = await start_slow_step(core, 100, None)
    receiver = engine._client._cores[0].receiver
    start = time.monotonic()
    await engine.abort(["r0", "r99"])
    again = asyncio.create_task(read(engine, "r0", text_of))
    (core_id,) = await core.core_ids("r0")
    for _ in range(20):
        await asyncio.sleep(0)
    assert receiver.is_busy
    # all of this took a small part of the step
    assert time.monotonic() - start < 50 * SLOW_S
    (thread,) = output_threads()
    # earlier outputs are not lost, and none comes after the end
    loop_thread = threading.get_ident()
    assert await tasks[0] == [(thread.ident, [[7]]), (loop_thread, [[]])]
    assert [token_ids for _, token_ids in await tasks[99]] == [[[]]]
    await wait_until(lambda: not receiver.is_busy)
    await engine.abort(f"r{i}" for i in range(1, 99))
    for task in tasks[1:99]:
        assert [token_ids for _, token_ids in await task] in ([[[7]], [[]]], [[[7], []]])
    core.step(EngineCoreOutput(core_id, [9], finish_reason=FinishReason.LENGTH))
    assert await again == [(thread.ident, [[9]])]
    assert engine._output.num_requests == engine._output.num_sequences == 0


@in_its_loop
async def test_an_abort_tells_of_sequences_that_the_step_would_have_told_of(core: PlayedCore) -> None:
    engine = core.engine
    both = asyncio.create_task(read(engine, "both", text_of, n=2))
    first_id, second_id = await core.core_ids("both")
    num_shaped = 0

    def slow(_: RequestOutput) -> None:
        nonlocal num_shaped
        num_shaped += 1
        time.sleep(SLOW_S)

    others = [asyncio.create_task(read(engine, f"r{i}", slow)) for i in range(30)]
    ids = [(await core.core_ids(f"r{i}"))[0] for i in range(30)]
    core.step(
        EngineCoreOutput(first_id, [1, 2], finish_reason=FinishReason.LENGTH),
        EngineCoreOutput(second_id, [3]),
        *(EngineCoreOutput(core_id, [7], finish_reason=FinishReason.LENGTH) for core_id in ids),
    )
    await wait_until(lambda: num_shaped > 0)
    await engine.abort("both")
    assert engine._client._cores[0].receiver.is_busy
    assert [token_ids for _, token_ids in await both] == [[[1, 2], [3]]]
    await asyncio.gather(*others)
    assert engine._output.num_requests == 0


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
async def test_a_core_that_dies_while_its_step_is_processed(finish: FinishReason | None) -> None:
    """Messages sent before its end are processed; every request ends."""
    async with played() as core:
        engine = core.engine
        # for longer than last messages are waited for
        tasks = await start_slow_step(core, 60, finish)
        waiting = asyncio.create_task(read(engine, "waiting", text_of))
        await core.core_ids("waiting")
        assert engine.core_pid is not None
        os.kill(engine.core_pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, waiting), 30)
        assert isinstance(results.pop()[0], EngineDeadError)
        for items in results:
            assert items[0][1] == [[7]]
            assert (len(items) == 1) if finish else isinstance(items[1], EngineDeadError)
        assert engine._output.num_requests == 0


async def test_a_failure_in_the_middle_of_a_step_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played() as core:
        engine = core.engine
        tasks = [asyncio.create_task(read(engine, f"r{i}", text_of)) for i in range(3)]
        ids = [(await core.core_ids(f"r{i}"))[0] for i in range(3)]
        update = SequenceState.update

        def failing(self: SequenceState, output: EngineCoreOutput) -> bool:
            if output.request_id == ids[1]:
                raise RuntimeError("boom")
            return update(self, output)

        monkeypatch.setattr(SequenceState, "update", failing)
        core.step(*(EngineCoreOutput(core_id, [7], finish_reason=FinishReason.LENGTH) for core_id in ids))
        first, second, third = await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert [token_ids for _, token_ids in first] == [[[7]]]
        for items in (second, third):
            assert len(items) == 1
            assert isinstance(items[0], EngineDeadError) and "boom" in str(items[0])


@in_its_loop
async def test_a_shape_that_fails_ends_its_request_alone(core: PlayedCore) -> None:
    engine = core.engine

    def failing(_: RequestOutput) -> None:
        raise ValueError("no shape")

    wrong = asyncio.create_task(read(engine, "wrong", failing))
    right = asyncio.create_task(read(engine, "right", text_of))
    (wrong_id,), (right_id,) = await core.core_ids("wrong"), await core.core_ids("right")
    core.step(EngineCoreOutput(wrong_id, [1]), EngineCoreOutput(right_id, [1]))
    (error,) = await asyncio.wait_for(wrong, 30)
    assert isinstance(error, ValueError)
    assert engine.running_request_ids() == ["right"]
    assert wrong_id not in engine._client._cores[0].open_ids  # the core was told
    core.step(EngineCoreOutput(right_id, [2], finish_reason=FinishReason.LENGTH))
    items = await asyncio.wait_for(right, 30)
    assert [token_id for _, token_ids in items for token_id in token_ids[0]] == [1, 2]
    assert engine.is_running


@in_its_loop
async def test_an_end_is_told_once_the_core_and_the_metrics_know(core: PlayedCore) -> None:
    """So a client that has its answer finds it in the metrics, and a stopped sequence aborted in the core."""
    engine = core.engine
    text = engine.tokenizer.decode([40, 41])
    known: list[tuple[bool, float]] = []
    successes = engine._metrics._cores[0]._successes
    before = successes["stop"]

    async def ask() -> None:
        async for output in engine.generate("Hello!", delta(stop=[text]), "r"):
            if output.finished:
                is_stopped = core_id not in engine._client._cores[0].open_ids
                known.append((is_stopped, successes["stop"] - before))

    task = asyncio.create_task(ask())
    (core_id,) = await core.core_ids("r")
    for token_id in (40, 41):
        core.step(EngineCoreOutput(core_id, [token_id]))
    await asyncio.wait_for(task, 30)
    assert known == [(True, 1)]


# ---- the thread's end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["never ready", "loading", "ready", "busy", "dead"])
async def test_shutdown_leaves_no_thread(state: str) -> None:
    others = output_threads()
    engine = make_engine()
    core = PlayedCore(engine)
    waiting: asyncio.Future[Any] | None = None
    try:
        if state == "loading":
            waiting = asyncio.ensure_future(engine.ready())
            await wait_until(lambda: output_threads() != others)
        elif state == "dead":
            await core.start()
        elif state != "never ready":
            await engine.ready()
        if state == "busy":
            core.stop_real_core()
            waiting = asyncio.gather(*await start_slow_step(core, 30, None))
            os.kill(engine.core_pid or 0, signal.SIGCONT)
        elif state == "dead":
            os.kill(engine.core_pid or 0, signal.SIGKILL)
            await wait_until(lambda: engine.errored)
    finally:
        start = time.monotonic()
        engine.shutdown()
        engine.shutdown()
        core.close()
    assert time.monotonic() - start < 20
    assert output_threads() == others
    if waiting is not None:
        for result in await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 30):
            last = result if state == "loading" else result[-1][-1]
            assert isinstance(last, EngineDeadError)


def test_event_loops_may_come_and_go() -> None:
    """Also with a loop that is closed before the engine is."""

    async def use(engine: AsyncLLM) -> None:
        outputs = [output async for output in engine.generate("Hello!", delta(), "r")]
        assert outputs[-1].finished

    async def use_and_shut_down() -> None:
        engine = make_engine()
        try:
            await use(engine)
        finally:
            engine.shutdown()

    others = output_threads()
    asyncio.run(use_and_shut_down())
    engine = make_engine()
    try:
        asyncio.run(use(engine))
    finally:
        engine.shutdown()
    assert output_threads() == others


# ---- the lock ----------------------------------------------------------------------------------------------


def test_who_waits_for_the_lock_gets_it_next() -> None:
    """Although the thread that releases it acquires it again at once."""
    lock = FairLock()
    turns: list[str] = []

    def wait() -> None:
        with lock:
            turns.append("waited")

    for _ in range(50):
        with lock:
            thread = threading.Thread(target=wait)
            thread.start()
            deadline = time.monotonic() + 30
            while not lock._turnstile.locked():
                assert time.monotonic() < deadline
                time.sleep(0.001)
        with lock:
            turns.append("again")
        thread.join()
    assert turns == ["waited", "again"] * 50


def test_an_exception_releases_the_lock() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="x"), lock:
        raise ValueError("x")
    with lock:
        pass
