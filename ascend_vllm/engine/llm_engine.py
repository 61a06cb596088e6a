"""The synchronous engine: the caller turns the crank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.inproc_client import InprocCoreClient
from ascend_vllm.engine.input_processor import InputProcessor, PromptType
from ascend_vllm.engine.metrics import EngineMetrics
from ascend_vllm.engine.output_processor import OutputProcessor
from ascend_vllm.engine.request_stats import StepStats
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.engine.tokenizer_extension import tokenizer_of
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ascend_vllm.engine.args import EngineArgs


class LLMEngine:
    """An engine that runs in the caller's process, one step per call.

    Args:
        config: of the engine.

    Attributes:
        config: of the engine.
        tokenizer: None under --skip-tokenizer-init.
        metrics: what is counted.

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
        self.config = config
        self.tokenizer = None if config.model.skip_tokenizer_init else tokenizer_of(config.model)
        self.metrics = EngineMetrics(config)
        self._client = InprocCoreClient(config)
        self.metrics.set_num_blocks(self._client.ready.num_gpu_blocks, self._client.ready.num_cpu_blocks)
        self._make_processors()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Makes an engine of its arguments.

        Raises:
            ConfigError: an argument, or a combination of arguments, is wrong.
            ModelLoadError: the model's directory cannot be served.
        """
        return cls(args.create_engine_config())

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._input.max_model_len

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
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queues a request.

        Args:
            request_id: must not be in use.
            prompt: text, {"prompt": text} or {"prompt_token_ids": ids}.
            params: how to sample; on a pooling model, what to make of the prompt.
            arrival_time: seconds of time.monotonic(); None: now.
            priority: lower is served first; 0 unless the engine runs with --scheduling-policy priority.
            cache_salt: only requests with the same one share cached prefixes; None: all without one do.

        Raises:
            RequestError: the request is wrong; nothing was queued.
        """
        salt = cache_salt
        if isinstance(params, PoolingParams):
            request = self._input.process_pooling(request_id, prompt, params, priority, arrival_time, cache_salt=salt)
        else:
            request = self._input.process(request_id, prompt, params, priority, arrival_time, cache_salt=salt)
        self._output.add(request)
        for core_request in request.core_requests:
            self._client.add_request(core_request)

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns what is due by each request's output_kind.

        Of a pooling request this is one output, which `pooled` belongs to.
        """
        outputs = self._client.step()
        stats = StepStats()
        processed = self._output.process(outputs, stats)
        self._client.abort_requests(processed.stopped_ids)
        self.metrics.record(outputs.stats, stats)
        self.metrics.log_if_due()
        return processed.request_outputs

    def abort_request(self, request_id: str | list[str]) -> None:
        """Ends requests early, without an output; unknown ids are ignored."""
        stats = StepStats()
        for id_ in [request_id] if isinstance(request_id, str) else request_id:
            self._client.abort_requests(self._output.abort(id_, stats))
        self.metrics.record(None, stats)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self._client.has_unfinished()

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return self._output.num_requests

    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling defaults of the model's generation_config.json, as keywords of `SamplingParams`."""
        return self._input.default_sampling_params()

    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a method of the engine core, for example "audit".

        Raises:
            RequestError: there is no such method.
        """
        return self._client.call_utility(method, *args)

    def shutdown(self) -> None:
        """Frees the model and the KV cache; may be called again."""
        self._client.shutdown()
        self._output.shutdown()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def _make_processors(self) -> None:
        self._input = InputProcessor(self.config, self.tokenizer)
        self._input.max_model_len = self._client.ready.max_model_len
        self._output = OutputProcessor.from_config(self.config, self.tokenizer)
