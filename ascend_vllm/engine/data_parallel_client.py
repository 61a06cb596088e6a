"""The API-server process's end of the wires to all engine cores: one, or several that share the requests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.core_client import AsyncCoreClient
from ascend_vllm.engine.core_receiver import LoopTask
from ascend_vllm.engine.data_parallel import config_of_engine, environment_of_engine
from ascend_vllm.engine.request_router import RequestRouter
from ascend_vllm.errors import AscendVllmError, EngineDeadError
from ascend_vllm.types.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady


class DataParallelClient:
    """Starts --data-parallel-size engine cores, each in a process of its own, and talks to all of them.

    A request goes to the core that a `RequestRouter` chooses, with all its sequences, and its abort to the same one.
    Calls go to all cores. The cores live and die together: the first one's end is that of the others.

    `start` needs no event loop; all other methods belong to that of `ready`.

    Args:
        config: of the engine.
        on_outputs: called with what each step of a core gives back, and the core's number, in a thread that belongs
            to this core; returns what the event loop is then to do.
        on_death: called once if a core ends without having been told to or hangs, after its start.

    Raises:
        ConfigError: VLLM_ENGINE_ITERATION_TIMEOUT_S is no number of seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[EngineCoreOutputs, int], LoopTask],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._error: EngineDeadError | None = None
        size = config.parallel.data_parallel_size
        self._router = RequestRouter(size, config.cache.block_size, by_prefix=config.cache.enable_prefix_caching)
        self._cores: list[AsyncCoreClient] = []
        try:
            for rank in range(size):
                self._cores.append(
                    AsyncCoreClient(
                        config_of_engine(config, rank),
                        functools.partial(self._take_outputs, rank),
                        self._end_all,
                        environment_of_engine(config, rank),
                    )
                )
        except BaseException:
            self.shutdown()
            raise

    @property
    def error(self) -> AscendVllmError | None:
        """Why the cores are gone; None while they live."""
        if self._error is not None:
            return self._error
        return next((core.error for core in self._cores if core.error is not None), None)

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the cores, by their numbers; None before `start`."""
        return [core.pid for core in self._cores]

    def start(self) -> None:
        """Starts the processes."""
        for core in self._cores:
            core.start()

    async def ready(self) -> list[EngineReady]:
        """Waits until all cores have loaded their models; what each of them says, by their numbers.

        Raises:
            ConfigError: flags that do not fit the model or the machine.
            ModelLoadError: the model's directory cannot be served.
            EngineDeadError: a core died.
        """
        try:
            sizes = await asyncio.gather(*(core.ready() for core in self._cores))
        except AscendVllmError as error:
            self._abandon(EngineDeadError(str(error)))
            raise
        self._router.set_capacities(size.num_gpu_blocks for size in sizes)
        return list(sizes)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Sends the sequences of a request, one or more, to one of the cores.

        Raises:
            EngineDeadError: the cores are gone.
        """
        # the others follow the first
        rank, *_ = [self._router.route(request) for request in requests]
        try:
            self._cores[rank].add_requests(requests)
        except EngineDeadError:
            for request in requests:
                self._router.release(request.request_id)
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests early, in the cores that have them; nothing happens if these are gone."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            rank = self._router.engine_of(request_id)
            if rank is not None:
                by_rank.setdefault(rank, []).append(request_id)
        for rank, ids in by_rank.items():
            self._cores[rank].abort_requests(ids)
            self._release(rank, ids)

    def rank_of(self, request_id: str) -> int:
        """The number of the core that has a request; 0 if none has it."""
        return self._router.engine_of(request_id) or 0

    def is_idle(self, rank: int) -> bool:
        """Whether a core has no request, and so takes no steps that would tell of its state."""
        return self._router.is_idle(rank)

    def expect_steps(self, expected: bool) -> None:
        """Says whether the cores compute the requests that they have; those that pause may be silent."""
        for core in self._cores:
            core.expect_steps(expected)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a method of every core, and makes one result of theirs; see `merge_results`.

        Raises:
            RequestError: a core refuses the call, or has no such method.
            AscendVllmError: the method failed, with the core's words.
            EngineDeadError: the cores are gone.
        """
        if method in ("reset_prefix_cache", "sleep") or (method == "pause" and args[1:] == (True,)):
            self._router.forget_prefixes()
        # all of them, also if one fails: they shall not differ by whom the failure reached first
        results = await asyncio.gather(
            *(core.call_utility(method, *args) for core in self._cores), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return merge_results(method, results)

    def shutdown(self) -> None:
        """Ends the cores, all at the same time; takes seconds at most; may be called again."""
        for core in self._cores:
            core.begin_shutdown()
        for core in self._cores:
            core.shutdown()

    def _take_outputs(self, rank: int, outputs: EngineCoreOutputs) -> LoopTask:
        """Called in the core's output thread."""
        return functools.partial(self._finish_step, rank, outputs, self._on_outputs(outputs, rank))

    def _finish_step(self, rank: int, outputs: EngineCoreOutputs, task: LoopTask) -> None:
        if outputs.stats is not None:
            self._router.take_stats(rank, outputs.stats)
        self._release(rank, [output.request_id for output in outputs.outputs if output.finish_reason is not None])
        task()

    def _release(self, rank: int, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._router.release(request_id)
        if request_ids and self._router.is_idle(rank):
            self._cores[rank].note_idle()

    def _end_all(self, error: EngineDeadError) -> None:
        """One core is gone: so are the others, and whoever waits is told why."""
        if self._error is None:
            self._abandon(error)
            self._on_death(error)

    def _abandon(self, error: EngineDeadError) -> None:
        self._error = self._error or error
        for core in self._cores:
            core.abandon(error)


def merge_results(method: str, results: Sequence[Any]) -> Any:
    """Makes one result of those of all cores.

    - audit: counts are added up, requests' blocks are listed together, violations name the core;
    - stats: counts are added up, shares of a cache's blocks in use are their mean;
    - state: what is true of one core is true of the engine, so that one that still sleeps is not overlooked;
    - reset_prefix_cache: whether it was possible in all of them;
    - collective_rpc: the results of all workers, those of the first core first;
    - others return nothing.

    Args:
        method: of the engine core.
        results: of each core, by their numbers; at least one.
    """
    if len(results) == 1:
        return results[0]
    match method:
        case "audit" | "stats":
            return {name: _merge_field(name, [result[name] for result in results]) for name in results[0]}
        case "state":
            return {name: any(result[name] for result in results) for name in results[0]}
        case "reset_prefix_cache":
            return all(results)
        case "collective_rpc":
            return [one for result in results for one in result]
        case _:
            return results[0]


def _merge_field(name: str, values: Sequence[Any]) -> Any:
    if name == "violations":
        return [f"engine core {rank}: {sentence}" for rank, value in enumerate(values) for sentence in value]
    if isinstance(values[0], Mapping):
        return {key: entry for value in values for key, entry in value.items()}
    total = sum(values)
    return total / len(values) if name.endswith("_usage") else total
