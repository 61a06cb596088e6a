"""The engine core: schedule, execute, update."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.adapters import AdapterManager
from ascend_vllm.core.connectors import Connector, Connectors
from ascend_vllm.core.drafting import Drafting
from ascend_vllm.core.kv.manager import KVCacheManager
from ascend_vllm.core.pausing import Pausing
from ascend_vllm.core.request_queue import QUEUES
from ascend_vllm.core.scheduler import Scheduler
from ascend_vllm.core.structured.manager import StructuredOutputManager
from ascend_vllm.errors import EngineDeadError, RequestError
from ascend_vllm.executor.base import Executor, create_executor
from ascend_vllm.logger import init_logger
from ascend_vllm.types.controls import CONTROLS
from ascend_vllm.types.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from ascend_vllm.types.step import StepOutput

logger = init_logger(__name__)

# how long `step` waits for connectors if there is nothing to compute
_CONNECTOR_WAIT_S = 0.005


class EngineCore:
    """Scheduler and executor in the caller's thread: requests in, tokens out.

    Args:
        config: of the whole engine.
        executor: not yet initialised; the core shuts it down.
        structured: grammars of constrained requests; None: with the vocabulary of the model's tokenizer.
        connectors: what else requests wait for before they are queued.

    Attributes:
        num_blocks: KV blocks of the cache.
        num_cpu_blocks: blocks in CPU memory for preempted rows.

    Example::

        core = build(config)
        core.add_request(request)
        while core.has_unfinished():
            for output in core.step().outputs:
                print(output.request_id, output.new_token_ids)
        core.shutdown()
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        structured: StructuredOutputManager | None = None,
        connectors: Sequence[Connector] = (),
    ) -> None:
        self.config = config
        self._executor = executor
        size = executor.initialize()
        self.num_blocks, self.num_cpu_blocks = size.num_blocks, size.num_cpu_blocks
        kv_cache = KVCacheManager(
            self.num_blocks,
            config.cache.block_size,
            num_cpu_blocks=self.num_cpu_blocks,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            sliding_window=config.cache.sliding_window,
        )
        structured = structured or StructuredOutputManager(config.structured, config.model)
        self._adapters = None if config.lora is None else AdapterManager(config.lora, executor)
        own: list[Connector] = [structured] if self._adapters is None else [structured, self._adapters]
        self._connectors = Connectors([*own, *connectors])
        num_stages = config.parallel.pipeline_parallel_size
        self._scheduler = Scheduler(
            config.scheduler,
            kv_cache,
            QUEUES[config.scheduler.policy](),
            config.model.seed,
            self._connectors,
            num_stages,
            Drafting(config.speculation),
        )
        # outputs of the steps handed to the workers, oldest first
        self._in_flight: collections.deque[Future[StepOutput]] = collections.deque()
        # with two, the next step is scheduled and the last one's outputs are processed while one is computed; each
        # pipeline stage computes one
        self._max_in_flight = num_stages if num_stages > 1 else 1 + config.scheduler.async_scheduling
        # of steps that were awaited outside of `step`
        self._unemitted: collections.deque[EngineCoreOutputs] = collections.deque()
        self._pausing = Pausing(self._scheduler, executor, enable_sleep_mode=config.model.enable_sleep_mode)
        # the method of each row is here or in Pausing
        self._controls: dict[str, Callable[..., Any]] = {
            name: getattr(self if hasattr(self, name) else self._pausing, name) for name in CONTROLS
        }
        logger.debug(
            "KV cache: %d blocks of %d tokens. Maximum concurrency for %d tokens per request: %.2fx",
            self.num_blocks,
            config.cache.block_size,
            config.scheduler.max_model_len,
            kv_cache.num_tokens / config.scheduler.max_model_len,
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        """Adds a request; its outputs come from `step`, also if it can never be served.

        Raises:
            RequestError: there is an unfinished request with this id.
        """
        if self._pausing.is_paused:
            self._pausing.hold(request)
        else:
            self._scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output, before the next step; unknown ids are ignored."""
        request_ids = list(request_ids)
        self._pausing.drop(request_ids)
        self._scheduler.abort_requests(request_ids)
        self._check_if_idle()

    @property
    def death_descriptor(self) -> int | None:
        """Becomes readable when workers have died; None if they live in this process."""
        return self._executor.death_descriptor

    def check_health(self) -> None:
        """Checks that the workers can compute steps.

        Raises:
            EngineDeadError: one of them has died.
        """
        self._executor.check_health()

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to compute or to emit."""
        if self._in_flight or self._unemitted:
            return True
        scheduler = self._scheduler
        return scheduler.has_unfinished if self._pausing.makes_steps else scheduler.has_early_outputs

    def await_long_step(self) -> None:
        """Waits for the step under way if the next one would be scheduled before it ends, unless steps are short.

        Requests that arrive meanwhile are then in the next step. Scheduling takes so little of a long step that
        nothing is gained by doing it earlier.
        """
        if len(self._in_flight) == 1 and self._max_in_flight == 2 and self._scheduler.steps_are_long:
            # what it raises, `step` raises again
            with contextlib.suppress(Exception):
                self._in_flight[0].result()

    def step(self) -> EngineCoreOutputs:
        """Schedules steps until the workers have enough, and returns the outputs of the oldest.

        Raises:
            Exception: what the workers raised; afterwards only `fail_requests` and `shutdown` may be called.
        """
        if self._unemitted:
            return self._unemitted.popleft()
        self._make_steps(self._max_in_flight)
        if not self._in_flight and self._connectors.waiting:
            # nothing to compute: leave the processor to compilations, but return soon for new requests
            self._connectors.wait(_CONNECTOR_WAIT_S)
        outputs = self._scheduler.update(self._in_flight.popleft().result() if self._in_flight else None)
        self._check_if_idle()
        return outputs

    def make_next_step(self) -> None:
        """Hands the workers a step if they have none, except if steps are long.

        Called before the outputs of the last one are sent: rows that may not run ahead, because of drafts or a
        grammar, need not wait for that. After long steps they do, so that requests that arrive are in the next one.
        """
        if self._max_in_flight == 2 and not self._scheduler.steps_are_long:
            self._make_steps(1)

    def fail_requests(self, error: str) -> EngineCoreOutputs:
        """Ends all requests with an ERROR output that carries a sentence for the client."""
        self._pausing.release()
        outputs = self._scheduler.fail_requests(error)
        for output in outputs.outputs:
            if output.error == error:
                # not the request's fault
                output.error_class = EngineDeadError.__name__
        return outputs

    def audit(self) -> dict[str, Any]:
        """State of blocks and slots (`Scheduler.audit`); "violations" is empty if it is consistent."""
        return self._scheduler.audit()

    def stats(self) -> dict[str, Any]:
        """The current fields of SchedulerStats."""
        stats = self._scheduler.stats()
        drafts = None if stats.drafts is None else msgspec.structs.asdict(stats.drafts)
        return msgspec.structs.asdict(stats) | {"drafts": drafts}

    def idle_stats(self) -> SchedulerStats:
        """Statistics when no step follows the last one, whose tokens have been counted."""
        return msgspec.structs.replace(self._scheduler.stats(), num_prompt_tokens=0)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache without affecting running requests. Returns True: it cannot fail."""
        self._scheduler.kv_cache.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Pauses and frees memory, see `Pausing.sleep`; running requests are recomputed afterwards."""
        self._pausing.check_sleep(level)
        while self._in_flight:
            # removed only afterwards: if it fails, the next call of `step` fails, too
            output = self._in_flight[0].result()
            self._in_flight.popleft()
            self._unemitted.append(self._scheduler.update(output))
        self._pausing.sleep(level)

    def state(self) -> dict[str, bool]:
        """Whether the engine is paused, and whether it is asleep."""
        return {"is_paused": self._pausing.is_paused, "is_sleeping": self._pausing.is_sleeping}

    def profile(self, is_start: bool) -> None:
        """Starts or stops traces of the workers.

        Raises:
            RequestError: VLLM_TORCH_PROFILER_DIR is not set.
        """
        self._executor.collective_rpc("profile", (is_start,))

    def load_lora(self, name: str, number: int, path: str) -> str | None:
        """Loads an adapter, see `AdapterManager.load`; called again until it is no longer being loaded.

        Raises:
            RequestError: LoRA is not enabled.
        """
        return self._adapters_in_use.load(name, number, path)

    def remove_lora(self, number: int) -> bool:
        """Forgets an adapter, see `AdapterManager.forget`.

        Raises:
            RequestError: LoRA is not enabled.
        """
        return self._adapters_in_use.forget(number)

    def pin_lora(self, number: int) -> bool:
        """Keeps an adapter loaded, see `AdapterManager.pin`.

        Raises:
            RequestError: LoRA is not enabled, or the adapter cannot be pinned.
        """
        return self._adapters_in_use.pin(number)

    def list_loras(self) -> list[int]:
        """Numbers of the loaded adapters.

        Raises:
            RequestError: LoRA is not enabled.
        """
        return self._adapters_in_use.numbers()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, see `Executor.collective_rpc`."""
        return self._executor.collective_rpc(method, args, kwargs, timeout)

    def call_utility(self, method: str, args: list[Any]) -> Any:
        """Calls one of `CONTROLS` by its name.

        Raises:
            RequestError: there is none with that name.
        """
        if method not in self._controls:
            raise RequestError(f"unknown utility {method!r}; there are {', '.join(self._controls)}", "method")
        return self._controls[method](*args)

    def note_failure(self, reason: str) -> None:
        """Records why the engine ends, for the executor's `shutdown`, if something has failed."""
        self._executor.note_failure(reason)

    def shutdown(self) -> None:
        """Ends the workers and the connectors; unfinished requests are dropped."""
        self._connectors.close()
        self._executor.shutdown()

    @property
    def _adapters_in_use(self) -> AdapterManager:
        if self._adapters is None:
            raise RequestError("LoRA is not enabled (--enable-lora).", "lora_request")
        return self._adapters

    def _make_steps(self, most: int) -> None:
        """Schedules steps, and hands them to the workers, until these have so many or no row can have another one."""
        while len(self._in_flight) < most and self._pausing.makes_steps:
            scheduled = self._scheduler.schedule()
            if scheduled is None:
                break
            self._in_flight.append(self._executor.execute_model(scheduled))

    def _check_if_idle(self) -> None:
        """Logs an error if blocks or slots are not free though there are no requests."""
        if not (self._scheduler.has_unfinished or self._in_flight) and not self._scheduler.is_clean():
            logger.error("Blocks or slots are lost: %s", self._scheduler.audit())


def build(config: EngineConfig) -> EngineCore:
    """The engine core of a configuration, with the model loaded and the KV cache allocated.

    Raises:
        ConfigError: the KV cache cannot hold a sequence of max_model_len, or flags do not fit the machine.
        ModelLoadError: the model's directory cannot be served.
    """
    executor = create_executor(config)
    try:
        return EngineCore(config, executor)
    except BaseException:
        executor.shutdown()
        raise
