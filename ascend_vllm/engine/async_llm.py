"""The asynchronous engine: what HTTP servers call.

Everything here runs on one event loop except `AsyncLLM._on_outputs`, which turns tokens into outputs in the output
thread. Tokenising has threads of its own, and the model runs in the engine-core process; the loop moves messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry

from ascend_vllm.config.engine import EngineConfig, ParallelConfig
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.engine.adapter_tokenizers import AdapterTokenizers
from ascend_vllm.engine.api_group import ApiGroup, Count, SharedCounts
from ascend_vllm.engine.async_controls import AsyncControls
from ascend_vllm.engine.core_client import CoreClient
from ascend_vllm.engine.core_process import CoreProcess
from ascend_vllm.engine.core_receiver import LoopTask
from ascend_vllm.engine.input_processor import InputProcessor, ProcessedRequest, PromptType, refuse_adapters
from ascend_vllm.engine.metrics import BACKLOG_FULL, LOG_INTERVAL_S, EngineMetrics, StepStats
from ascend_vllm.engine.output_processor import OutputProcessor, OutputQueue, ProcessedOutputs
from ascend_vllm.engine.pooling import pooling_output
from ascend_vllm.engine.tokenizer_extension import tokenizer_of
from ascend_vllm.errors import DuplicateRequestError, EngineBusyError, EngineDeadError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreOutputs

if TYPE_CHECKING:
    from ascend_vllm.args.engine_args import EngineArgs

logger = init_logger(__name__)

T = TypeVar("T")

_NO_PROCESSORS = (
    "logits_processors are functions, which only LLM and LLMEngine can call: here the model runs in another process."
)
_BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
_BACKLOG = (
    "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
)
# limit per request: every step of its rows compares with all of them
MAX_BAD_WORD_TOKENS = 8192


class AsyncLLM(AsyncControls):
    """An engine whose core runs in a process of its own; with --data-parallel-size several share the requests.

    The constructor starts these processes and returns before the model is loaded; `ready` waits for it.

    Args:
        config: of the engine.
        group: of the API-server processes that share the engine cores, which their parent starts; None: the cores are
            this process's own.
        cores: the processes of the engine cores, if this process has made them already; with `group` they are its.

    Attributes:
        config: of the engine.
        group: as given.
        tokenizer: None under --skip-tokenizer-init.
        num_kv_blocks: blocks of the KV caches of all engine cores together; 0 until the engine is ready.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.

    Example::

        engine = AsyncLLM.from_engine_args(EngineArgs(model="/models/Qwen2.5-0.5B-Instruct"))
        await engine.ready()
        async for output in engine.generate("Hello", SamplingParams(max_tokens=8), "request-0"):
            print(output.outputs[0].text)
        engine.shutdown()
    """

    def __init__(
        self, config: EngineConfig, group: ApiGroup | None = None, cores: Sequence[CoreProcess] | None = None
    ) -> None:
        super().__init__(group)
        self.config = config
        counts = None if group is None else group.counts
        self._metrics = EngineMetrics(config, counts)
        self._client = CoreClient(config, self._on_outputs, self._on_death, group, cores)
        self._client.start()
        try:
            # meanwhile the core imports torch and reads the weights
            self.tokenizer = None if config.model.skip_tokenizer_init else tokenizer_of(config.model)
            self._input = InputProcessor(config, self.tokenizer, MAX_BAD_WORD_TOKENS)
        except BaseException:
            self._client.shutdown()
            raise
        self._output = OutputProcessor.from_config(config, self.tokenizer)
        self._limits = QueueLimits(config, self._output, self._metrics, counts)
        self.num_kv_blocks = 0
        self._is_ready = False
        self._refusal: RequestError | None = None
        self._log_task: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLM:
        """Makes an engine from its arguments.

        Raises:
            ConfigError: an argument, or a combination of arguments, is wrong.
            ModelLoadError: files are missing in the model's directory.
        """
        return cls(args.create_engine_config())

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._input.max_model_len

    @property
    def metrics(self) -> CollectorRegistry:
        """The registry of the engine's Prometheus metrics."""
        return self._metrics.registry

    @property
    def errored(self) -> bool:
        """Whether the engine core is gone."""
        return self._client.error is not None

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return self._is_ready and not self.errored

    @property
    def core_pid(self) -> int | None:
        """Process id of the engine core, of the first one if there are several."""
        return self._client.pids[0]

    async def ready(self) -> None:
        """Waits until the model is loaded.

        Raises:
            ConfigError: flags that do not fit the model or the machine.
            ModelLoadError: the model's directory cannot be served.
        """
        sizes = await self._client.ready()
        if self._is_ready:
            return
        self._is_ready = True
        self._input.max_model_len = min(size.max_model_len for size in sizes)
        self.num_kv_blocks = sum(size.num_gpu_blocks for size in sizes)
        for rank, size in enumerate(sizes):
            self._metrics.set_num_blocks(size.num_gpu_blocks, size.num_cpu_blocks, rank)
        if self.config.observability.log_stats:
            self._log_task = asyncio.get_running_loop().create_task(self._log_stats(), name="engine-log")

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: Any = None,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generates; yields outputs as `sampling_params.output_kind` says, the last one with `finished` set.

        Closing the generator, or cancelling the task in it, ends the request.

        Args:
            prompt: text, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: how to sample.
            request_id: must not be in use.
            lora_request: the LoRA adapter to use; None: the model as it is.
            prompt_adapter_request: not supported in this version.
            trace_headers: W3C headers of the caller's trace, to which the request's span is added.
            priority: lower is served first; 0 unless the engine runs with --scheduling-policy priority.
            cache_salt: only requests with the same one share cached prefixes; None: all without one do.

        Raises:
            RequestError: the request is wrong; nothing was queued.
            EngineBusyError: too many requests wait.
        """
        extra = {"prompt_adapter_request": prompt_adapter_request}
        options = (trace_headers, priority, cache_salt, lora_request)
        process = self._processing(prompt, sampling_params, request_id, *options, **extra)
        return self._outputs(request_id, process, sampling_params.num_sequences, None)

    def generate_shaped(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        shape: Callable[[RequestOutput], T],
        *,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        is_further: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[T, None]:
        """`generate`, but yields `shape(output)` for each output.

        Args:
            prompt, sampling_params, request_id, trace_headers, priority, cache_salt, lora_request: as in `generate`.
            shape: called with each output in turn: in the output thread while the reader keeps up, otherwise in the
                reader's. It must not block; an exception ends the request.
            is_further: not the first of several requests that the caller sends for one of its own; other callers'
                requests may be admitted before it.

        Raises:
            Exception: what `generate` or `shape` raised.
        """
        options = (trace_headers, priority, cache_salt, lora_request)
        process = self._processing(prompt, sampling_params, request_id, *options)
        return self._outputs(request_id, process, sampling_params.num_sequences, shape, is_further)

    def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        is_further: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pools a prompt; yields the result, once. For pooling models.

        Closing the generator, or cancelling the task in it, ends the request.

        Args:
            prompt: text, {"prompt": text} or {"prompt_token_ids": ids}.
            pooling_params: how to pool.
            request_id, priority, cache_salt, lora_request: as in `generate`.
            is_further: as in `generate_shaped`.

        Raises:
            RequestError: the request is wrong, and nothing was queued; or it was aborted.
            EngineBusyError: too many requests wait.
        """
        process = functools.partial(
            self._input.process_async,
            request_id,
            prompt,
            pooling_params,
            priority,
            cache_salt=cache_salt,
            lora=lora_request,
        )
        return self._outputs(request_id, process, 1, pooling_output, is_further)

    def _processing(
        self,
        prompt: PromptType,
        params: SamplingParams,
        id_: str,
        trace: Any,
        priority: int,
        salt: Any,
        lora: LoRARequest | None,
        **extra: Any,
    ) -> Callable[[], Awaitable[ProcessedRequest]]:
        """A coroutine function that checks and tokenises a prompt; run when the generator is first awaited."""

        async def process() -> ProcessedRequest:
            refuse_adapters(**extra)
            if params.logits_processors:
                raise RequestError(_NO_PROCESSORS, "logits_processors")
            request = await self._input.process_async(id_, prompt, params, priority, cache_salt=salt, lora=lora)
            request.trace_headers = trace
            return request

        return process

    async def _outputs(
        self,
        request_id: str,
        process: Callable[[], Awaitable[ProcessedRequest]],
        num_sequences: int,
        shape: Callable[[RequestOutput], T] | None,
        is_further: bool = False,
    ) -> AsyncGenerator[T, None]:
        """Sends a request, once `process` has checked and tokenised it, and yields its outputs.

        The request is aborted if the generator is closed before its end.
        """
        await self.check_health()
        if not self._is_ready:
            await self.ready()
        if request_id in self._output or request_id in self._limits:
            raise DuplicateRequestError(f"Request {request_id} already exists.", "request_id")
        with self._limits.admit(request_id, num_sequences):
            request = await process()
        if self._refusal is not None:
            raise self._refusal
        queue = self._output.make_queue(request.params.output_kind, shape)
        self._output.add(request, queue)
        try:
            request.core_requests[0].is_further |= is_further
            self._client.add_requests(request.core_requests)
            self._limits.publish()
            while not queue.has_ended:
                yield await queue.get()
        finally:
            if not queue.has_ended:
                self._abort(request_id, queue)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests early; their generators end with finish_reason "abort". Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._abort(one)

    def running_request_ids(self) -> list[str]:
        """Ids of the requests that run or wait."""
        return self._output.request_ids()

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine died."""
        if self._client.error is not None:
            raise EngineDeadError(str(self._client.error))

    @property
    def is_stopped(self) -> bool:
        """Whether no request can be served any more."""
        return self.errored

    async def get_model_config(self) -> ModelConfig:
        return self.config.model

    async def get_scheduler_config(self) -> SchedulerConfig:
        return self.config.scheduler

    async def get_parallel_config(self) -> ParallelConfig:
        return self.config.parallel

    async def get_tokenizer(self, lora_request: Any = None) -> Any:
        """The transformers tokenizer of the model, or of a LoRA adapter that has one of its own.

        Raises:
            RequestError: there is none (--skip-tokenizer-init).
        """
        tokenizer = await self.tokenizers.load(lora_request)
        if tokenizer is None:
            raise RequestError("there is no tokenizer: the engine runs with --skip-tokenizer-init")
        return tokenizer.hf

    @property
    def tokenizers(self) -> AdapterTokenizers:
        """Of LoRA adapters."""
        return self._input.tokenizers

    async def do_log_stats(self) -> None:
        """Logs the line of statistics, if it is due."""
        self._metrics.log_if_due()

    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling defaults of the model's generation_config.json, as keywords of `SamplingParams`."""
        return self._input.default_sampling_params()

    def refuse(self, error: RequestError) -> None:
        """Fails all unfinished requests, and from now on every new one, with this error."""
        self._refusal = error
        self._on_death(error)

    def shutdown(self) -> None:
        """Ends the engine core; unfinished requests fail with EngineDeadError. May be called again."""
        self._client.shutdown()
        self._output.fail_all(EngineDeadError("the engine was shut down"))
        self._output.shutdown()
        if self._log_task is not None:
            self._log_task.cancel()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def _abort(self, request_id: str, queue: OutputQueue[Any] | None = None) -> None:
        """Ends a request; with a queue, only if it is still the one with this queue."""
        if queue is not None and self._output.queue_of(request_id) is not queue:
            return
        stats = StepStats()
        core_ids = self._output.abort(request_id, stats)
        if core_ids:
            rank = self._client.rank_of(core_ids[0])
            self._client.abort_requests(core_ids)
            if self.config.observability.log_requests:
                logger.info("Aborted request %s.", request_id)
            self._metrics.record(None, stats, rank)
            self._limits.publish()
            self._note_idle(rank)

    def _on_outputs(self, outputs: EngineCoreOutputs, rank: int) -> LoopTask:
        """Processes the outputs of one core's step; called in this core's output thread."""
        stats = StepStats()
        processed = self._output.process(outputs, stats)
        return functools.partial(self._finish_step, outputs, stats, processed, rank)

    def _finish_step(
        self, outputs: EngineCoreOutputs, stats: StepStats, processed: ProcessedOutputs, rank: int
    ) -> None:
        """Publishes a step's outputs and records its statistics; called on the event loop."""
        # consumers run only after this callback
        processed.publish()
        self._client.abort_requests(processed.stopped_ids)
        if outputs.stats is not None:
            self._limits.num_waiting[rank] = outputs.stats.num_waiting
        self._metrics.record(outputs.stats, stats, rank)
        self._limits.publish()
        self._note_idle(rank)

    def _note_idle(self, rank: int) -> None:
        """Resets the statistics of a core without requests: it takes no steps, so sends no new ones."""
        if self._end_waiters:
            self._wake_end_waiters()
        if self._client.is_idle(rank):
            self._limits.num_waiting[rank] = 0
            self._metrics.set_idle(rank)

    def _on_death(self, error: Exception) -> None:
        self._output.fail_all(error)
        self._wake_end_waiters()

    async def _log_stats(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while not self.errored:
                self._metrics.log_if_due()
                await asyncio.sleep(LOG_INTERVAL_S)


class QueueLimits:
    """Enforces --max-num-queued-reqs and --max-num-queued-tokens; counts requests from their arrival on.

    Args:
        config: of the engine.
        output: holds the requests that were sent to the engine cores.
        metrics: count refusals.
        counts: of all API-server processes; None: this is the only one.

    Attributes:
        num_waiting: waiting requests, as each core last reported.
    """

    def __init__(
        self,
        config: EngineConfig,
        output: OutputProcessor,
        metrics: EngineMetrics,
        counts: SharedCounts | None = None,
    ) -> None:
        self._config = config
        self._output = output
        self._metrics = metrics
        scheduler = config.scheduler
        has_limits = scheduler.max_num_queued_reqs is not None or scheduler.max_num_queued_tokens is not None
        self._counts = counts if has_limits else None
        # request id → sequences of requests that are being checked and tokenised
        self._admitted: dict[str, int] = {}
        self.num_waiting = [0] * config.parallel.data_parallel_size

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id is being checked and tokenised."""
        return request_id in self._admitted

    @contextlib.contextmanager
    def admit(self, request_id: str, num_sequences: int) -> Iterator[None]:
        """Counts a request while it is checked and tokenised.

        Raises:
            EngineBusyError: too many requests, or prompt tokens, wait.
        """
        # no other process admits one between the check and the count
        with contextlib.nullcontext() if self._counts is None else self._counts.lock():
            self._check()
            self._admitted[request_id] = num_sequences
            self.publish()
        try:
            yield
        finally:
            del self._admitted[request_id]

    def publish(self) -> None:
        """Tells the other API-server processes what this one has in flight."""
        if self._counts is not None:
            self._counts.publish(Count.SEQUENCES, self._num_sequences())
            if self._config.scheduler.max_num_queued_tokens is not None:
                self._counts.publish(Count.PREFILL_TOKENS, self._output.num_prefill_tokens)

    def _num_sequences(self) -> int:
        return self._output.num_sequences + sum(self._admitted.values())

    def _of_others(self, count: Count) -> int:
        return 0 if self._counts is None else self._counts.of_others(count)

    def _check(self) -> None:
        """Refuses a request if too many wait: by the count beyond --max-num-seqs, or by the cores' own."""
        scheduler = self._config.scheduler
        most_tokens = scheduler.max_num_queued_tokens
        if (
            most_tokens is not None
            and self._output.num_prefill_tokens + self._of_others(Count.PREFILL_TOKENS) >= most_tokens
        ):
            self._metrics.count_rejection(BACKLOG_FULL)
            raise EngineBusyError(_BACKLOG)
        limit = scheduler.max_num_queued_reqs
        if limit is None:
            return
        in_flight = self._num_sequences() + self._of_others(Count.SEQUENCES)
        beyond_running = in_flight - scheduler.max_num_seqs * self._config.parallel.data_parallel_size
        num_waiting = sum(self.num_waiting)
        if beyond_running >= limit or (num_waiting > 0 and num_waiting >= limit):
            self._metrics.count_rejection()
            raise EngineBusyError(_BUSY)


# vLLM 0.6's name
AsyncLLMEngine = AsyncLLM
