"""Captured graphs on Ascend NPUs, by torch_npu's NPUGraph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ascend_vllm.platforms.interface import DeviceGraph, GraphRecorder

# HCCL watches its collectives from a thread of its own
_ERROR_MODE = "thread_local"


class NpuGraphRecorder(GraphRecorder):
    """Captures graphs that share one pool of memory.

    Args:
        npu: the module `torch_npu.npu`. Any: it has no annotations.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        self._pool = npu.graph_pool_handle()
        self._stream = npu.Stream()

    def capture(self, work: Callable[[], None]) -> NpuGraph:
        graph = self._npu.NPUGraph()
        self._npu.synchronize()
        # attention takes lengths as host arguments, which a graph would keep: this records such calls so that replays
        # can update them
        stream = self._npu.current_stream()
        try:
            with self._npu.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                auto_dispatch_capture=True,
                capture_error_mode=_ERROR_MODE,
            ):
                work()
        except RuntimeError:
            # where a capture cannot end, torch_npu leaves neither its stream nor its way of calling operators
            if self._npu.current_stream() != stream:
                graph.graph_dispatch_mode.__exit__(None, None, None)
                self._npu.set_stream(stream)
            raise
        return NpuGraph(self._npu, graph)

    def capture_pieces(self, work: Callable[[Callable[[], None]], None]) -> list[DeviceGraph]:
        """See `GraphRecorder.capture_pieces`."""
        pieces: list[Any] = []

        def begin() -> None:
            graph = self._npu.NPUGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode=_ERROR_MODE)
            pieces.append(graph)

        def split() -> None:
            pieces[-1].capture_end()
            begin()

        self._npu.synchronize()
        with self._npu.stream(self._stream):
            begin()
            try:
                work(split)
            except RuntimeError:
                # what went wrong is more than that the capture cannot end
                with contextlib.suppress(RuntimeError):
                    pieces[-1].capture_end()
                raise
            pieces[-1].capture_end()
        return [NpuGraphPiece(graph) for graph in pieces]


class NpuGraph(DeviceGraph):
    """A captured graph.

    Attributes:
        graph: torch_npu's object.
    """

    def __init__(self, npu: Any, graph: Any) -> None:
        self.graph = graph
        # that of all graphs, on which torch_npu updates operators
        self._updates = graph.graph_dispatch_mode.update_stream
        self._done = npu.Event()

    def replay(self, host_arguments: Mapping[str, list[int]]) -> None:
        """See `DeviceGraph.replay`; the host does not wait.

        The replay begins at once. Before each operator that has an update it waits for the event which is recorded
        behind that update, so that the host prepares the updates of later layers while earlier ones run. Updates wait
        for the end of this graph's last replay, which may still need what they replace.
        """
        self.graph.replay()
        self._updates.wait_event(self._done)
        self.graph.update(cpu_update_input=[dict(host_arguments)])
        self._done.record()


class NpuGraphPiece(DeviceGraph):
    """A captured graph without operators that have host arguments.

    Args:
        graph: torch_npu's object.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self, host_arguments: Mapping[str, list[int]]) -> None:  # noqa: ARG002 - there are none
        """See `DeviceGraph.replay`."""
        self._graph.replay()
