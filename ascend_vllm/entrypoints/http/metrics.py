"""Metrics of HTTP requests under the names of prometheus-fastapi-instrumentator, which vLLM's dashboards know.

A plain ASGI middleware: it reads the headers of request and answer, and the time at the answer's end. Each chunk of a
stream costs one extra call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm.engine.api_group import Count, SharedCounts
from ascend_vllm.engine.metrics import Histogram
from ascend_vllm.entrypoints.http.access import declared_path, matched_route

# polled by monitoring
_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
# handler label of all requests that match no route
_NO_HANDLER = "none"

# in seconds: the instrumentator's, and finer ones below them
_DURATION_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1]
_HIGHR_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75]
_HIGHR_BUCKETS += [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60]


class HttpMetrics(Collector):
    """Counts of requests by their route, method and class of status."""

    def __init__(self) -> None:
        # (method, class of status such as "2xx", route) → requests
        self._requests: dict[tuple[str, str, str], int] = {}
        # route → requests, bytes of their bodies and answers according to Content-Length, which streams lack
        self._sizes: dict[str, tuple[int, int, int]] = {}
        # (route, method) → seconds
        self._durations: dict[tuple[str, str], Histogram] = {}
        self._all_durations = Histogram("", "", _HIGHR_BUCKETS)

    def record(
        self, handler: str, method: str, status: int, num_request_bytes: int, num_response_bytes: int, seconds: float
    ) -> None:
        key = (method, f"{status // 100}xx", handler)
        self._requests[key] = self._requests.get(key, 0) + 1
        count, received, sent = self._sizes.get(handler, (0, 0, 0))
        self._sizes[handler] = (count + 1, received + num_request_bytes, sent + num_response_bytes)
        durations = self._durations.get((handler, method))
        if durations is None:
            durations = self._durations[handler, method] = Histogram("", "", _DURATION_BUCKETS)
        durations.observe(seconds)
        self._all_durations.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests by method, status and handler.", labels=["method", "status", "handler"]
        )
        for key, count in self._requests.items():
            requests.add_metric(key, count)
        yield requests
        received = SummaryMetricFamily(
            "http_request_size_bytes", "Content length of requests by handler.", labels=["handler"]
        )
        sent = SummaryMetricFamily(
            "http_response_size_bytes", "Content length of answers by handler; streams have none.", labels=["handler"]
        )
        for handler, (count, num_received, num_sent) in self._sizes.items():
            received.add_metric([handler], count, num_received)
            sent.add_metric([handler], count, num_sent)
        yield received
        yield sent
        highr = HistogramMetricFamily(
            "http_request_duration_highr_seconds", "Time to the end of the answer, of all handlers together."
        )
        buckets, total = self._all_durations.samples()
        highr.add_metric([], buckets, total)
        yield highr
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "Time to the end of the answer by handler.", labels=["handler", "method"]
        )
        for labels, histogram in self._durations.items():
            buckets, total = histogram.samples()
            durations.add_metric(labels, buckets, total)
        yield durations


class HttpMetricsMiddleware:
    """Records every request in `HttpMetrics`.

    Args:
        app: the application.
        metrics: to record in.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        head: Message | None = None

        async def send_measured(message: Message) -> None:
            nonlocal head
            if head is None:
                head = message
            await send(message)

        try:
            await self._app(scope, receive, send_measured)
        finally:
            # without an answer of the application the server sends a 500
            status = 500 if head is None else head["status"]
            # the router has put the route into the scope
            handler = declared_path(scope.get("route"))
            if handler not in _UNCOUNTED:
                self._metrics.record(
                    _NO_HANDLER if status == 405 else handler or _NO_HANDLER,
                    scope["method"],
                    status,
                    _content_length(Headers(scope=scope)),
                    0 if head is None else _content_length(Headers(raw=list(head["headers"]))),
                    time.perf_counter() - start,
                )


def _content_length(headers: Headers) -> int:
    value = headers.get("content-length", "")
    return int(value) if value.isdecimal() else 0


class ServerLoad:
    """Counts the generating requests that are in progress, for GET /load.

    Args:
        counts: of all API-server processes; None: this is the only one.
    """

    def __init__(self, counts: SharedCounts | None = None) -> None:
        self._counts = counts
        self._num_own = 0

    @property
    def num_requests(self) -> int:
        """In progress now, in all processes."""
        return self._num_own + (0 if self._counts is None else self._counts.of_others(Count.LOAD))

    def add(self, change: int) -> None:
        """Counts requests that begin, or, if negative, have ended."""
        self._num_own += change
        if self._counts is not None:
            self._counts.publish(Count.LOAD, self._num_own)


# prefixes of routes that use the model
_WORK = ("/v1/", "/v2/", "/inference/", "/invocations", "/pooling", "/score", "/rerank", "/classify")


class ServerLoadMiddleware:
    """Updates a `ServerLoad`; a stream is in progress until its end.

    Args:
        app: the application.
        load: to update.
    """

    def __init__(self, app: ASGIApp, load: ServerLoad) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "http" and scope["method"] == "POST"
        if not is_work or not declared_path(matched_route(scope)).startswith(_WORK):
            await self._app(scope, receive, send)
            return
        self._load.add(1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.add(-1)
