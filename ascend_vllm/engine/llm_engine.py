"""The synchronous engine: each step is a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascend_vllm.config.engine import EngineConfig, ParallelConfig
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.engine.adapter_tokenizers import AdapterTokenizers
from ascend_vllm.engine.input_processor import InputProcessor, PromptType, refuse_adapters
from ascend_vllm.engine.metrics import EngineMetrics, StepStats
from ascend_vllm.engine.metrics_reader import Metric, read_metrics
from ascend_vllm.engine.output_processor import OutputProcessor
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.engine.tokenizer_extension import tokenizer_of
from ascend_vllm.errors import ConfigError, RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ascend_vllm.args.engine_args import EngineArgs
    from ascend_vllm.core.engine_core import EngineCore


# how often the core is asked whether an adapter is loaded
_LOADING_POLL_S = 0.005


class LLMEngine:
    """An engine that runs in the caller's process, one step per call.

    Args:
        config: of the engine.

    Attributes:
        config: of the engine.
        tokenizer: None under --skip-tokenizer-init.
        metrics: of the engine.

    Raises:
        ConfigError: flags that do not fit the model or the machine.
        ModelLoadError: the model's directory cannot be served.

    Example::

        engine = LLMEngine.from_engine_args(EngineArgs(model="/models/Qwen2.5-0.5B-Instruct"))
        engine.add_request("0", "Hello", SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text)
    """

    def __init__(self, config: EngineConfig) -> None:
        refuse_data_parallel(config)
        self.config = config
        self.tokenizer = None if config.model.skip_tokenizer_init else tokenizer_of(config.model)
        self.metrics = EngineMetrics(config)
        # imported here: API servers do not need the core, torch and the models
        from ascend_vllm.core.engine_core import build

        self._core: EngineCore | None = build(config)
        self.metrics.set_num_blocks(self._core.num_blocks, self._core.num_cpu_blocks)
        self._make_processors()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Makes an engine from its arguments.

        Raises:
            ConfigError: an argument, or a combination of arguments, is wrong.
            ModelLoadError: the model's directory cannot be served.
        """
        return cls(args.create_engine_config())

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._input.max_model_len

    @property
    def core(self) -> EngineCore:
        """The engine core.

        Raises:
            RuntimeError: the engine was shut down.
        """
        if self._core is None:
            raise RuntimeError("the engine was shut down")
        return self._core

    @property
    def tokenizers(self) -> AdapterTokenizers:
        """Of LoRA adapters."""
        return self._input.tokenizers

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Replaces the tokenizer.

        Raises:
            RuntimeError: requests are running with the old one.
        """
        if self.has_unfinished_requests():
            raise RuntimeError("the tokenizer cannot be replaced while requests run")
        self._output.shutdown()
        self.tokenizer = tokenizer
        self._make_processors()

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: Any = None,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queues a request.

        Args:
            request_id: must not be in use.
            prompt: text, {"prompt": text} or {"prompt_token_ids": ids}.
            params: how to sample; on a pooling model, how to pool.
            arrival_time: seconds of time.monotonic(); None: now.
            lora_request: the LoRA adapter to use; None: the model as it is.
            prompt_adapter_request: not supported in this version.
            trace_headers: W3C headers of the caller's trace, to which the request's span is added.
            priority: lower is served first; 0 unless the engine runs with --scheduling-policy priority.
            cache_salt: only requests with the same one share cached prefixes; None: all without one do.

        Raises:
            RequestError: the request is wrong; nothing was queued.
        """
        refuse_adapters(prompt_adapter_request=prompt_adapter_request)
        if self.get_parallel_config().world_size > 1 and getattr(params, "logits_processors", None):
            raise RequestError(
                "logits_processors are functions, which workers in other processes cannot call: use a single worker.",
                "logits_processors",
            )
        request = self._input.process(
            request_id, prompt, params, priority, arrival_time, cache_salt=cache_salt, lora=lora_request
        )
        request.trace_headers = trace_headers
        self._output.add(request)
        for core_request in request.core_requests:
            self.core.add_request(core_request)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs due by each request's output_kind.

        A pooling request has one output, whose result is `pooled`.

        Raises:
            RuntimeError: the engine was shut down.
            Exception: whatever the model, or a function of the user's, raised; the model and the cache are freed.
        """
        try:
            outputs = self.core.step()
        except Exception:
            self._close_core()
            raise
        stats = StepStats()
        processed = self._output.process(outputs, stats)
        self._abort_in_core(processed.stopped_ids)
        self.metrics.record(outputs.stats, stats)
        self.metrics.log_if_due()
        return processed.request_outputs

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter, so that the first request with it need not wait. Returns True.

        Raises:
            RequestError: LoRA is not enabled, or the adapter cannot be loaded; the text says why.
        """
        while (reason := self.call_utility("load_lora", *lora_request.key)) is None:
            time.sleep(_LOADING_POLL_S)
        if reason:
            raise RequestError(reason, "lora_path")
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter, once requests that use it have ended; returns whether it was loaded.

        Raises:
            RequestError: LoRA is not enabled.
        """
        return bool(self.call_utility("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Numbers of the loaded adapters (`LoRARequest.lora_int_id`).

        Raises:
            RequestError: LoRA is not enabled.
        """
        return set(self.call_utility("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keeps a loaded adapter in memory until it is removed. Returns True.

        Raises:
            RequestError: LoRA is not enabled, there is no such adapter, or no other could be loaded then.
        """
        return bool(self.call_utility("pin_lora", lora_id))

    def abort_request(self, request_id: str | list[str]) -> None:
        """Ends requests early, without an output; unknown ids are ignored."""
        stats = StepStats()
        for id_ in [request_id] if isinstance(request_id, str) else request_id:
            self._abort_in_core(self._output.abort(id_, stats))
        self.metrics.record(None, stats)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self._core is not None and self._core.has_unfinished()

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return self._output.num_requests

    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling defaults of the model's generation_config.json, as keywords of `SamplingParams`."""
        return self._input.default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer.

        Raises:
            RequestError: there is none (skip_tokenizer_init).
        """
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: the engine was made with skip_tokenizer_init=True")
        return self.tokenizer.hf

    def get_model_config(self) -> ModelConfig:
        return self.config.model

    def get_scheduler_config(self) -> SchedulerConfig:
        return self.config.scheduler

    def get_parallel_config(self) -> ParallelConfig:
        return self.config.parallel

    def check_health(self) -> None:
        """Raises EngineDeadError if the worker is gone."""
        self.call_utility("check_health")

    def do_log_stats(self) -> None:
        """Logs the line of statistics, if it is due."""
        self.metrics.log_if_due()

    def get_metrics(self) -> list[Metric]:
        """All metrics as they are now.

        Raises:
            RuntimeError: statistics are off.
        """
        if not self.config.observability.log_stats:
            raise RuntimeError("Stat logging disabled: there are metrics only with disable_log_stats=False.")
        return read_metrics(self.metrics.registry)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; requests that run keep their blocks. Returns whether it was possible."""
        return bool(self.call_utility("reset_prefix_cache"))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pauses and releases memory until `wake_up`; needs enable_sleep_mode=True.

        Args:
            level: what to release: 0: nothing; 1: the KV cache; 2: also the weights, which are reloaded later.
            mode: what to do with unfinished requests: "abort" ends them, "keep" recomputes them afterwards. There is
                no "wait", since only the caller makes steps.

        Raises:
            RequestError: there is no such level or mode, or the engine may not sleep.
        """
        if mode not in ("abort", "keep"):
            raise RequestError(f"mode must be 'abort' or 'keep', got {mode!r}", "mode")
        self.call_utility("check_sleep", level)
        if mode == "abort":
            self.abort_request(self._output.request_ids())
        self.call_utility("sleep", level)
        self.metrics.set_sleep_level(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates released memory again; requests go on once all of it is back.

        Args:
            tags: "weights", "kv_cache"; None: both.

        Raises:
            RequestError: a tag is unknown, or the KV cache would wake up before the weights.
            ConfigError: the memory is not available any more.
            ModelLoadError: the weights cannot be read any more.
        """
        self.call_utility("wake_up", tags)
        if not self.is_sleeping():
            self.metrics.set_sleep_level(0)

    def is_sleeping(self) -> bool:
        """Whether memory of the engine is released."""
        return bool(self.call_utility("state")["is_sleeping"])

    def is_paused(self) -> bool:
        """Whether no step is made until `wake_up`."""
        return bool(self.call_utility("state")["is_paused"])

    def start_profile(self) -> None:
        """Begins a trace of the worker in VLLM_TORCH_PROFILER_DIR.

        Raises:
            RequestError: it is not set.
        """
        self.call_utility("profile", True)

    def stop_profile(self) -> None:
        """Ends the trace and writes its file.

        Raises:
            RequestError: VLLM_TORCH_PROFILER_DIR is not set.
        """
        self.call_utility("profile", False)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or a function with each worker in front of the arguments.

        Returns:
            What each worker returned.

        Raises:
            RequestError: workers have no such method.
            TimeoutError: it takes longer than `timeout` seconds.
        """
        return list(self.call_utility("collective_rpc", method, timeout, args, kwargs))

    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a method of the engine core, for example "audit".

        Raises:
            RequestError: there is no such method.
        """
        return self.core.call_utility(method, list(args))

    def shutdown(self) -> None:
        """Frees the model and the KV cache; may be called again."""
        self._close_core()
        self._output.shutdown()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def _abort_in_core(self, core_ids: list[str]) -> None:
        if core_ids and self._core is not None:
            self._core.abort_requests(core_ids)

    def _close_core(self) -> None:
        if self._core is not None:
            self._core.shutdown()
            self._core = None

    def _make_processors(self) -> None:
        self._input = InputProcessor(self.config, self.tokenizer)
        self._output = OutputProcessor.from_config(self.config, self.tokenizer)


def refuse_data_parallel(config: EngineConfig) -> None:
    """Refuses --data-parallel-size above 1, which needs several processes.

    Raises:
        ConfigError: it is above 1.
    """
    size = config.parallel.data_parallel_size
    if size > 1:
        raise ConfigError(
            f"LLM(data_parallel_size={size}) is not supported for single-process usage. Please start a server with "
            f"--data-parallel-size {size}, or an LLM in each of {size} processes, which share the prompts."
        )
