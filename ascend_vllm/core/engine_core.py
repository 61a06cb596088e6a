"""The engine core: schedule, execute, update."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.connectors import Connector, Connectors
from ascend_vllm.core.kv.manager import KVCacheManager
from ascend_vllm.core.pausing import Pausing
from ascend_vllm.core.request_queue import QUEUES
from ascend_vllm.core.scheduler import Scheduler
from ascend_vllm.core.structured.manager import StructuredOutputManager
from ascend_vllm.errors import EngineDeadError, RequestError
from ascend_vllm.executor.base import Executor, create_executor
from ascend_vllm.logger import init_logger
from ascend_vllm.types.controls import CONTROLS
from ascend_vllm.types.messages import EngineCoreOutputs, EngineCoreRequest
from ascend_vllm.types.step import StepOutput

logger = init_logger(__name__)

# how long a step that has nothing to compute waits for what requests wait for
_CONNECTOR_WAIT_S = 0.005


class EngineCore:
    """Requests in, tokens out; runs where it is called, on one thread.

    Args:
        config: of the whole engine.
        executor: not yet initialised; the core owns it from here on.
        structured: gives constrained requests their grammars; None: with the vocabulary of the model's tokenizer.
        connectors: what else requests wait for before they wait for their turn.

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
        self._connectors = Connectors([structured, *connectors])
        num_stages = config.parallel.pipeline_parallel_size
        self._scheduler = Scheduler(
            config.scheduler,
            kv_cache,
            QUEUES[config.scheduler.policy](),
            config.model.seed,
            self._connectors,
            num_stages,
        )
        # steps that the workers compute or will compute, oldest first
        self._in_flight: collections.deque[Future[StepOutput]] = collections.deque()
        # with two, one is made, and the outputs of the one before are told, while one is computed; stages compute
        # one each
        self._max_in_flight = num_stages if num_stages > 1 else 1 + config.scheduler.async_scheduling
        # what steps gave that were waited for outside of `step`
        self._untold: collections.deque[EngineCoreOutputs] = collections.deque()
        self._pausing = Pausing(self._scheduler, executor, enable_sleep_mode=config.model.enable_sleep_mode)
        # each row has its method here or in what pauses
        self._controls: dict[str, Callable[..., Any]] = {
            name: getattr(self if hasattr(self, name) else self._pausing, name) for name in CONTROLS
        }
        logger.info(
            "KV cache: %d blocks of %d tokens. Maximum concurrency for %d tokens per request: %.2fx",
            self.num_blocks,
            config.cache.block_size,
            config.scheduler.max_model_len,
            kv_cache.num_tokens / config.scheduler.max_model_len,
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        """Takes a request in; its outputs come from `step`, also if it can never be served.

        Raises:
            RequestError: a request of that id lives.
        """
        if self._pausing.is_paused:
            self._pausing.hold(request)
        else:
            self._scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output, before the next step; unknown ids are ignored."""
        request_ids = list(request_ids)
        self._pausing.forget(request_ids)
        self._scheduler.abort_requests(request_ids)
        self._check_if_idle()

    @property
    def death_descriptor(self) -> int | None:
        """Readable when the workers are gone; None if they cannot go without this process."""
        return self._executor.death_descriptor

    def check_health(self) -> None:
        """Returns if the workers can take a step.

        Raises:
            EngineDeadError: one of them is gone.
        """
        self._executor.check_health()

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        if self._in_flight or self._untold:
            return True
        scheduler = self._scheduler
        return scheduler.has_unfinished if self._pausing.makes_steps else scheduler.has_early_outputs

    def step(self) -> EngineCoreOutputs:
        """Has steps made until the workers are busy, waits for the oldest and takes in what it gave.

        Raises:
            Exception: whatever the workers raised; no step can follow, only `fail_requests` and `shutdown`.
        """
        if self._untold:
            return self._untold.popleft()
        while len(self._in_flight) < self._max_in_flight and self._pausing.makes_steps:
            scheduled = self._scheduler.schedule()
            if scheduled is None:
                break
            self._in_flight.append(self._executor.execute_model(scheduled))
        if not self._in_flight and self._connectors.num_waiting:
            # nothing to compute: let those who compile have the processor, but look after new requests soon
            self._connectors.wait(_CONNECTOR_WAIT_S)
        outputs = self._scheduler.update(self._in_flight.popleft().result() if self._in_flight else None)
        self._check_if_idle()
        return outputs

    def fail_requests(self, error: str) -> EngineCoreOutputs:
        """Ends all requests with an ERROR output that carries a sentence for the client."""
        self._pausing.release()
        outputs = self._scheduler.fail_requests(error)
        for output in outputs.outputs:
            if output.error == error:
                # no fault of the request's
                output.error_class = EngineDeadError.__name__
        return outputs

    def audit(self) -> dict[str, Any]:
        """The accounts of blocks and slots (`Scheduler.audit`); "violations" is empty if they are consistent."""
        return self._scheduler.audit()

    def stats(self) -> dict[str, Any]:
        """The fields of SchedulerStats as they are now."""
        return msgspec.structs.asdict(self._scheduler.stats())

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; requests that run are not disturbed. Always True: nothing can prevent it."""
        self._scheduler.kv_cache.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Pauses and gives memory back, see `Pausing.sleep`; requests that run are computed again afterwards."""
        self._pausing.check_sleep(level)
        while self._in_flight:
            # left where it is if it fails: then the next step does, too
            output = self._in_flight[0].result()
            self._in_flight.popleft()
            self._untold.append(self._scheduler.update(output))
        self._pausing.sleep(level)

    def state(self) -> dict[str, bool]:
        """Whether it pauses, and whether it sleeps."""
        return {"is_paused": self._pausing.is_paused, "is_sleeping": self._pausing.is_sleeping}

    def profile(self, is_start: bool) -> None:
        """Begins or ends traces of the workers.

        Raises:
            RequestError: VLLM_TORCH_PROFILER_DIR is not set.
        """
        self._executor.collective_rpc("profile", (is_start,))

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
            RequestError: there is none of that name.
        """
        if method not in self._controls:
            raise RequestError(f"unknown utility {method!r}; there are {', '.join(self._controls)}", "method")
        return self._controls[method](*args)

    def note_failure(self, reason: str) -> None:
        """Told before `shutdown` when the engine ends because something has failed."""
        self._executor.note_failure(reason)

    def shutdown(self) -> None:
        """Ends the workers, and what compiles grammars; requests that live are dropped."""
        self._connectors.close()
        self._executor.shutdown()

    def _check_if_idle(self) -> None:
        """With no request alive every block and slot must be free; the moment to notice if not."""
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
