"""Several API-server processes: what the first one answers for all of them, and the sum of their metrics.

Any process accepts a request. One that concerns the whole server, such as a stored response or a pause, is passed on
to the first process as an ASGI application sees it: the scope, what is received and what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm.engine.api_group import HTTP, ApiGroup, FrameStream
from ascend_vllm.entrypoints.http.access import declared_path, matched_route
from ascend_vllm.errors import EngineDeadError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

# prefixes of the routes that the first process answers: responses are stored there, and pauses concern the requests
# of all processes, which it asks
_FORWARDED = ("/metrics", "/v1/responses", "/pause", "/resume", "/abort_requests", "/sleep", "/wake_up")
# the rest of a scope is made anew
_SCOPE_FIELDS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
# name, help text, type, and samples as (name, labels, value)
_PlainFamily = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]


class ForwardingMiddleware:
    """Passes some requests on to the first process.

    Args:
        app: the application.
        group: of which this process is not the first.
    """

    def __init__(self, app: ASGIApp, group: ApiGroup) -> None:
        self._app = app
        self._group = group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and declared_path(matched_route(scope)).startswith(_FORWARDED):
            await self._forward(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and its answer back.

        Raises:
            EngineDeadError: the first process is gone, or gave the answer up.
        """
        stream = await self._group.connect(0)
        head = {field: scope[field] for field in _SCOPE_FIELDS} | {"client": scope.get("client")}
        received = asyncio.create_task(_pass_received(receive, stream))
        try:
            await stream.write([HTTP, head])
            while True:
                message = await stream.read()
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    return
        except (OSError, EOFError) as error:
            # an answer whose client has gone is given up
            if not (received.done() and received.result()):
                raise EngineDeadError("API server 0, which answers this for all, gave no answer") from error
        finally:
            received.cancel()
            await asyncio.gather(received, return_exceptions=True)
            stream.close()


async def _pass_received(receive: Receive, stream: FrameStream) -> bool:
    """Whether the client has gone; False: the first process takes nothing any more."""
    with contextlib.suppress(OSError):
        while True:
            message = await receive()
            is_gone = bool(message["type"] == "http.disconnect")
            await stream.write(message)
            if is_gone:
                return True
    return False


def answering_forwarded(app: ASGIApp, own_tasks: set[asyncio.Task[None]]) -> Callable[[Any, FrameStream], Any]:
    """Answers forwarded requests by an application.

    Args:
        app: the first process's.
        own_tasks: the requests that its server waits for when it ends.
    """

    async def answer(head: Any, stream: FrameStream) -> None:
        task = asyncio.create_task(_answer(app, head, stream))
        own_tasks.add(task)
        task.add_done_callback(own_tasks.discard)
        (error,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(error, Exception):
            logger.error("A request of another API server failed", exc_info=error)

    return answer


async def _answer(app: ASGIApp, head: dict[str, Any], stream: FrameStream) -> None:
    client = head["client"]
    headers = [tuple(pair) for pair in head["headers"]]
    scope = head | {"client": client and tuple(client), "headers": headers, "root_path": "", "state": {}}
    scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}
    received: asyncio.Queue[Message] = asyncio.Queue(maxsize=1)
    pump = asyncio.create_task(_read_into(received, stream))
    has_disconnected = is_complete = False

    async def receive() -> Message:
        nonlocal has_disconnected
        message: Message = {"type": "http.disconnect"} if has_disconnected else await received.get()
        has_disconnected = message["type"] == "http.disconnect"
        return message

    async def send(message: Message) -> None:
        nonlocal is_complete
        # the client is gone: the application learns it from `receive`
        with contextlib.suppress(OSError):
            await stream.write(message)
        is_complete = message["type"] == "http.response.body" and not message.get("more_body")

    try:
        await app(scope, receive, send)
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
    if is_complete:
        # closed with a part of the request unread, the connection would be reset, and the answer perhaps be lost
        await stream.read_to_end()


async def _read_into(received: asyncio.Queue[Message], stream: FrameStream) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            await received.put(await stream.read())
    await received.put({"type": "http.disconnect"})


def plain_families(families: Iterable[Metric]) -> list[_PlainFamily]:
    """Metrics as data that another process can be sent."""
    return [
        (
            family.name,
            family.documentation,
            family.type,
            [(one.name, one.labels, one.value) for one in family.samples],
        )
        for family in families
    ]


class SummedMetrics(Collector):
    """Metrics of several processes as one.

    Counters, histograms and summaries are summed. Gauges are the first process's, which alone knows the engine's.

    Args:
        processes: what each of them has, the first one first.
    """

    def __init__(self, processes: Sequence[Sequence[_PlainFamily]]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for index, families in enumerate(self._processes):
            for name, documentation, kind, samples in families:
                if index and kind not in ("counter", "histogram", "summary"):
                    continue
                found.setdefault(name, Metric(name, documentation, kind))
                sums = values.setdefault(name, {})
                for sample, labels, value in samples:
                    key = sample, tuple(labels.items())
                    sums[key] = sums.get(key, 0.0) + value
        for name, family in found.items():
            for (sample, labels_of_sample), value in values[name].items():
                family.add_sample(sample, dict(labels_of_sample), value)
            yield family


async def metrics_of_all(group: ApiGroup, own: Iterable[Metric]) -> Collector:
    """The metrics of all processes as one.

    Args:
        group: of which this process is the first; the others have a handler "metrics".
        own: this process's.
    """
    return SummedMetrics([plain_families(own), *await group.ask_others("metrics")])
