"""Counts how often text was parsed for tool calls, and whether calls were found: vLLM's metric."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ascend_vllm.entrypoints.parsers.tools import ToolDelta, ToolParser

_MODES = ("streaming", "non_streaming")
_REQUEST_TYPES = ("chat_completions", "responses", "other")
_OUTCOMES = ("tool_call", "no_tool_call")
_LABELS = ["mode", "model_name", "outcome", "request_type"]


class ToolCallCounts:
    """Counts by mode, type of request and outcome.

    As in vLLM, a whole answer counts once, and a stream once for every chunk of text that is parsed. Any thread may
    count.
    """

    def __init__(self) -> None:
        # (mode, type of request, outcome) → count
        self.counts = dict.fromkeys(itertools.product(_MODES, _REQUEST_TYPES, _OUTCOMES), 0)
        self._lock = threading.Lock()

    def add(self, is_stream: bool, request_type: str, found: bool) -> None:
        """Count one parsed chunk, or a whole text."""
        key = _MODES[0] if is_stream else _MODES[1], request_type, _OUTCOMES[0] if found else _OUTCOMES[1]
        with self._lock:
            self.counts[key] += 1


class ToolCallCollector(Collector):
    """Exports `ToolCallCounts` to Prometheus, all with the label `model_name`."""

    def __init__(self, counts: ToolCallCounts, model_name: str) -> None:
        self._counts = counts
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "vllm:tool_call_parser_invocations", "Texts in which tool calls were looked for.", labels=_LABELS
        )
        for (mode, request_type, outcome), count in self._counts.counts.items():
            family.add_metric([mode, self._model_name, outcome, request_type], count)
        yield family


class CountedToolParser(ToolParser):
    """Wraps a parser and counts whether it finds calls.

    Args:
        parser: to wrap.
        counts: incremented with every chunk.
        is_stream: whether the text comes in chunks, each of which counts.
        request_type: "chat_completions", "responses" or "other".
    """

    def __init__(self, parser: ToolParser, counts: ToolCallCounts, is_stream: bool, request_type: str) -> None:
        super().__init__(parser.tools)
        self._parser = parser
        self._counts = counts
        self._is_stream = is_stream
        self._request_type = request_type
        self._found = False

    def advance(self, text: str, final: bool) -> None:
        """Not used: `feed` and `finish` are the wrapped parser's."""
        self._parser.advance(text, final)

    def feed(self, text: str) -> ToolDelta:
        delta = self._parser.feed(text)
        if self._is_stream:
            self._counts.add(True, self._request_type, bool(delta.calls))
        self._found = self._found or bool(delta.calls)
        return delta

    def finish(self) -> ToolDelta:
        delta = self._parser.finish()
        if not self._is_stream:
            self._counts.add(False, self._request_type, self._found or bool(delta.calls))
        return delta
