"""The asynchronous engine's controls: pausing, sleeping, caches, traces and calls of workers."""

from __future__ import annotations

import abc
import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ascend_vllm.engine.api_group import ApiGroup
from ascend_vllm.engine.core_client import CoreClient
from ascend_vllm.engine.metrics import EngineMetrics
from ascend_vllm.engine.output_processor import OutputProcessor, OutputQueue
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest

# of `AsyncControls.pause_generation`
PAUSE_MODES = ("abort", "wait", "keep")
# how often the core is asked whether an adapter is loaded
LOADING_POLL_S = 0.01


class AsyncControls(abc.ABC):
    """The methods of `AsyncLLM` that wrap the engine cores' `CONTROLS`; all raise `EngineDeadError` once it died.

    With several API-server processes the first one is asked for pauses and sleep, and has the others do their part.

    Args:
        group: of the API-server processes; None: this is the only one.
    """

    _client: CoreClient
    _output: OutputProcessor
    _metrics: EngineMetrics

    def __init__(self, group: ApiGroup | None = None) -> None:
        self.group = group
        # set whenever requests have ended
        self._end_waiters: list[asyncio.Event] = []
        # requests with their queues, as the ids may be reused for new requests, by the number of the pause
        self._present: dict[int, dict[str, OutputQueue[Any] | None]] = {}
        self._pauses = itertools.count()
        if group is not None:
            parts = (
                self._remember_requests,
                self._wait_for_ends,
                self._end_present,
                self._forget_requests,
                self._expect_steps,
                self._abort_ids,
                self.running_request_ids,
            )
            group.handlers |= {part.__name__: part for part in parts}

    @abc.abstractmethod
    async def ready(self) -> None:
        """Waits until the model is loaded."""

    @abc.abstractmethod
    def running_request_ids(self) -> list[str]:
        """Ids of the requests that run or wait."""

    @abc.abstractmethod
    def _abort(self, request_id: str, queue: OutputQueue[Any] | None = None) -> None:
        """Ends a request; with a queue, only if it is still the one with this queue."""

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a method of the engine core, for example "audit"; of several the results are merged.

        Raises:
            AscendVllmError: the method failed.
        """
        return await self._client.call_utility(method, *args)

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; requests that run keep their blocks.

        Returns:
            Whether that was possible.
        """
        return bool(await self._client.call_utility("reset_prefix_cache"))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter, so that the first request with it need not wait. Returns True.

        Raises:
            RequestError: LoRA is not enabled, or the adapter cannot be loaded; the text says why.
        """
        await self.ready()
        while (reason := await self._client.call_utility("load_lora", *lora_request.key)) is None:
            await asyncio.sleep(LOADING_POLL_S)
        if reason:
            raise RequestError(reason, "lora_path")
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLMEngine.remove_lora`."""
        return bool(await self._client.call_utility("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """See `LLMEngine.list_loras`."""
        return set(await self._client.call_utility("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """See `LLMEngine.pin_lora`."""
        return bool(await self._client.call_utility("pin_lora", lora_id))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pauses generation until `resume_generation`; requests that come meanwhile wait.

        Args:
            mode: what to do with unfinished requests: "abort" ends them, "wait" returns when they have finished,
                "keep" freezes them until generation resumes.
            clear_cache: forget cached prefixes.

        Raises:
            RequestError: there is no such mode.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be one of {PAUSE_MODES}, got {mode!r}", "mode")
        await self.ready()
        pause = next(self._pauses)
        await self._everywhere(self._remember_requests, pause)
        try:
            if mode == "wait":
                # the core holds requests that come from now on
                await self._client.call_utility("pause", "wait", False)
                await self._everywhere(self._wait_for_ends, pause)
            await self._client.call_utility("pause", "keep", clear_cache)
            await self._everywhere(self._expect_steps, False)
            if mode == "abort":
                await self._everywhere(self._end_present, pause)
        finally:
            await self._everywhere(self._forget_requests, pause)

    async def resume_generation(self) -> None:
        """Ends `pause_generation`.

        Raises:
            RequestError: the engine sleeps.
        """
        await self._client.call_utility("resume")
        await self._everywhere(self._expect_steps, True)

    async def is_paused(self) -> bool:
        """Whether requests have to wait for `resume_generation` or `wake_up`."""
        return bool((await self._client.call_utility("state"))["is_paused"])

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pauses and releases memory until `wake_up`; needs --enable-sleep-mode.

        Args:
            level: what to release: 0: nothing; 1: the KV cache; 2: also the weights, which are reloaded later.
            mode: as in `pause_generation`; kept requests are recomputed afterwards.

        Raises:
            RequestError: there is no such level or mode, or the engine may not sleep.
        """
        await self.ready()
        await self._client.call_utility("check_sleep", level)
        await self.pause_generation(mode=mode, clear_cache=level > 0)
        await self._client.call_utility("sleep", level)
        self._metrics.set_sleep_level(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates released memory again; requests go on once all of it is back.

        Args:
            tags: "weights", "kv_cache"; None: both.

        Raises:
            RequestError: a tag is unknown, or the KV cache would wake up before the weights.
            AscendVllmError: the memory or the weights are not available any more.
        """
        await self._client.call_utility("wake_up", tags)
        if not await self.is_sleeping():
            self._metrics.set_sleep_level(0)
            await self._everywhere(self._expect_steps, True)

    async def is_sleeping(self) -> bool:
        """Whether memory of the engine is released."""
        return bool((await self._client.call_utility("state"))["is_sleeping"])

    async def start_profile(self) -> None:
        """Begins a trace of the workers in VLLM_TORCH_PROFILER_DIR.

        Raises:
            RequestError: it is not set.
        """
        await self._client.call_utility("profile", True)

    async def stop_profile(self) -> None:
        """Ends the trace and writes its file.

        Raises:
            RequestError: VLLM_TORCH_PROFILER_DIR is not set.
        """
        await self._client.call_utility("profile", False)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker; returns the results, as text where they cannot be serialised.

        They are ordered by engine core, then by rank.

        Raises:
            RequestError: workers have no such method.
            AscendVllmError: it failed, or took longer than `timeout` seconds.
        """
        result = await self._client.call_utility("collective_rpc", method, timeout, list(args), dict(kwargs or {}))
        return list(result)

    async def request_ids_of_all(self) -> list[str]:
        """Ids of the requests that run or wait, in all API-server processes."""
        ids = self.running_request_ids()
        if self.group is not None:
            for others in await self.group.ask_others(self.running_request_ids.__name__):
                ids += others
        return ids

    async def abort_everywhere(self, request_ids: Sequence[str]) -> None:
        """Ends requests of any API-server process early; unknown ids are ignored."""
        await self._everywhere(self._abort_ids, request_ids)

    async def _everywhere(self, part: Callable[..., Awaitable[None] | None], *args: Any) -> None:
        """Calls one of the methods of `__init__` here and in the other API-server processes."""
        own = part(*args)
        if own is not None:
            await own
        if self.group is not None:
            await self.group.ask_others(part.__name__, *args)

    def _remember_requests(self, pause: int) -> None:
        self._present[pause] = {id_: self._output.queue_of(id_) for id_ in self._output.request_ids()}

    def _forget_requests(self, pause: int) -> None:
        self._present.pop(pause, None)

    def _expect_steps(self, expected: bool) -> None:
        self._client.expect_steps(expected)

    def _abort_ids(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._abort(request_id)

    def _end_present(self, pause: int) -> None:
        for request_id, queue in self._present[pause].items():
            self._abort(request_id, queue)

    async def _wait_for_ends(self, pause: int) -> None:
        """Waits until all requests that were remembered have ended."""
        requests = self._present[pause]
        ended = asyncio.Event()
        self._end_waiters.append(ended)
        try:
            while any(self._output.queue_of(id_) is queue for id_, queue in requests.items()):
                await ended.wait()
                ended.clear()
        finally:
            self._end_waiters.remove(ended)

    def _wake_end_waiters(self) -> None:
        for waiter in self._end_waiters:
            waiter.set()
