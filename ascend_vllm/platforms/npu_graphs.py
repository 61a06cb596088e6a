"""Captured graphs on Ascend NPUs, by torch_npu's NPUGraph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ascend_vllm.platforms.interface import DeviceGraph, GraphRecorder


class NpuGraphRecorder(GraphRecorder):
    """Captures graphs that share one pool of memory.

    Args:
        npu: the module `torch_npu.npu`. Any: it has no annotations.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        self._pool = npu.graph_pool_handle()
        self._stream = npu.Stream()

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        graph = self._npu.NPUGraph()
        self._npu.synchronize()
        # attention takes lengths as host arguments, which a graph would keep: this records such calls so that replays
        # can update them
        with self._npu.graph(graph, pool=self._pool, stream=self._stream, auto_dispatch_capture=True):
            work()
        return _NpuGraph(self._npu, graph)


class _NpuGraph(DeviceGraph):
    def __init__(self, npu: Any, graph: Any) -> None:
        self._npu = npu
        self._graph = graph
        self._done = npu.Event()
        self._running = False

    def replay(self, host_arguments: Mapping[str, list[int]]) -> None:
        if self._running:
            # the arguments of a running replay must not be changed
            self._done.synchronize()
        self._graph.update(cpu_update_input=[dict(host_arguments)])
        self._graph.replay()
        self._done.record()
        self._running = True
