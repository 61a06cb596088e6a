"""Offline generation: the `LLM` class.

Example::

    from ascend_vllm import LLM, SamplingParams

    llm = LLM(model="/models/Qwen2.5-0.5B-Instruct")
    for output in llm.generate(["Hello, my name is"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.input_processor import PromptType, TokensPrompt
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.demo_model import with_demo_model
from ascend_vllm.entrypoints.offline.arguments import adapters_of, without_defaults
from ascend_vllm.entrypoints.offline.guided_options import with_guided_options
from ascend_vllm.entrypoints.offline.inputs import Messages, Prompts, collect_prompts
from ascend_vllm.entrypoints.offline.pooling import PoolingMethods
from ascend_vllm.entrypoints.offline.progress import Progress, UseTqdm
from ascend_vllm.entrypoints.templates.chat_template import ContentFormat, load_chat_template, render_chat
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(PoolingMethods):
    """A model in this process, for batches of prompts.

    All prompts of a call are served together by the engine's continuous batching; there is no batch size to choose.

    Args:
        model: directory of the model; "demo" trains and serves the small demo model.
        tokenizer: directory of the tokenizer; None: the model's.
        tokenizer_mode: "auto" or "slow".
        skip_tokenizer_init: prompts must be token ids, and no text is returned.
        trust_remote_code: run code from the model's directory.
        tensor_parallel_size: devices that share each layer.
        dtype: "auto", "float32", "float16" or "bfloat16".
        quantization: method of the weights' quantisation.
        revision, tokenizer_revision: versions in a model hub.
        seed: of sampling that no request seeds.
        gpu_memory_utilization: share of the device's memory to use (NPU).
        swap_space: GiB of CPU memory for swapped blocks.
        cpu_offload_gb: GiB of weights kept in CPU memory.
        enforce_eager: no captured graphs.
        max_context_len_to_capture, max_seq_len_to_capture: longest sequence that captured graphs serve.
        disable_custom_all_reduce, disable_async_output_proc: turn these optimisations off.
        mm_processor_kwargs: of the image processor.
        chat_template: file or text of a template for `chat`; None: the model's.
        kwargs: any other field of `EngineArgs`, such as max_model_len or max_num_seqs.

    Attributes:
        llm_engine: the engine underneath.

    Raises:
        TypeError: an unknown keyword.
        ConfigError: a value, or a combination of values, is wrong or not supported.
        ModelLoadError: the model's directory cannot be served.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4,
        cpu_offload_gb: float = 0,
        enforce_eager: bool | None = None,
        max_context_len_to_capture: int | None = None,
        max_seq_len_to_capture: int = 8192,
        disable_custom_all_reduce: bool = False,
        disable_async_output_proc: bool = False,
        mm_processor_kwargs: dict[str, Any] | None = None,
        *,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        # all arguments that are fields of `EngineArgs`
        settings = {name: value for name, value in locals().items() if name in EngineArgs.__dataclass_fields__}
        kwargs.setdefault("disable_log_stats", True)
        args = with_demo_model(
            EngineArgs(**settings | without_defaults(kwargs) | {"enforce_eager": bool(enforce_eager)})
        )
        self._chat_template = load_chat_template(chat_template)
        self._request_ids = itertools.count()
        # outputs of `enqueue`d requests that finished during another call's steps
        self._done: dict[str, RequestOutput] = {}
        self.llm_engine = LLMEngine.from_engine_args(args)
        # the engine is shut down with this object, so that the next one finds its memory free
        self._finalizer = weakref.finalize(self, self.llm_engine.shutdown)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: Params = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        guided_options_request: Any = None,
        priority: Sequence[int] | None = None,
        *,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts and returns when all are done.

        Args:
            prompts: a prompt or a list of prompts: text, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: for all prompts, or one for each; None: the model's defaults.
            prompt_token_ids: ids instead of `prompts`: of one prompt or of each.
            use_tqdm: show a progress bar, or a callable that makes one.
            lora_request: the LoRA adapter of all prompts, or a list with one or None for each.
            prompt_adapter_request, tokenization_kwargs, mm_processor_kwargs: not supported in this version.
            guided_options_request: what all outputs must look like, see `with_guided_options`; sampling_params with
                `structured_outputs` of their own are the other way to say it.
            priority: one for each prompt, lower is served first; other than 0 only under
                scheduling_policy="priority".

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt or a parameter is wrong (also a ValueError); no prompt has been run.
        """
        parsed = collect_prompts(
            prompts,
            prompt_token_ids,
            prompt_adapter_request=prompt_adapter_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        params = with_guided_options(self._collect_params(sampling_params, len(parsed)), guided_options_request)
        return self._add_and_run(parsed, params, use_tqdm, priority, adapters_of(lora_request, len(parsed)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        *,
        chat_template_content_format: ContentFormat = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation, or of each of a list of conversations.

        Args:
            messages: a conversation (a list of {"role", "content"}) or a list of conversations.
            chat_template: a template's text for this call.
            add_generation_prompt: begin a new message.
            continue_final_message: continue the last message; needs add_generation_prompt=False.
            tools: functions the model may call.
            chat_template_content_format: "auto", "string" or "openai".
            chat_template_kwargs: further variables of the template.
            sampling_params, use_tqdm, priority, lora_request, mm_processor_kwargs, tokenization_kwargs: as for
                `generate`.

        Returns:
            One output per conversation.

        Raises:
            RequestError: messages or a parameter are wrong.

        Example::

            llm.chat([{"role": "user", "content": "What does --block-size do?"}])
        """
        prompts = self._render(
            messages,
            lora_request,
            chat_template=chat_template or self._chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer.

        Raises:
            RequestError: there is none (skip_tokenizer_init).
        """
        return self._need_tokenizer().hf

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replaces the tokenizer by another transformers tokenizer."""
        self.llm_engine.set_tokenizer(Tokenizer(tokenizer))

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without sampling_params: the defaults of the model's generation_config.json."""
        return SamplingParams(**self.llm_engine.default_sampling_params())

    def beam_search(
        self,
        prompts: Sequence[PromptType | list[int]],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Finds the most likely sequences that begin with each prompt.

        Args:
            prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            params: width and length of the search.
            lora_request, use_tqdm: as for `generate`.
            concurrency_limit: most prompts that are searched at once; None: as many as fit.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt or a parameter is wrong (also a ValueError); no prompt has been run.

        Example::

            (output,) = llm.beam_search(["Hello, my name is"], BeamSearchParams(beam_width=4, max_tokens=32))
            print(output.sequences[0].text)
        """
        given: list[Any] = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        parsed = [TokensPrompt(prompt_token_ids=prompt) if isinstance(prompt, list) else prompt for prompt in given]
        adapters = adapters_of(lora_request, len(parsed))
        # the sequences' texts are made here, once they are complete
        one = params.to_sampling_params().clone(detokenize=False)
        size = len(parsed) if concurrency_limit is None else concurrency_limit
        if size < 1 and parsed:
            raise RequestError(f"concurrency_limit must be at least 1, got {size}", "concurrency_limit")
        outputs = []
        for start in range(0, len(parsed), max(size, 1)):
            part = parsed[start : start + size]
            part_adapters = adapters[start : start + size]
            outputs += self._add_and_run(part, [one] * len(part), use_tqdm, adapters=part_adapters)
        return [self._make_beam_search_output(output) for output in outputs]

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queues prompts for `wait_for_completion`, which runs them; the arguments are those of `generate`.

        Returns:
            Ids of the requests, in the order of the prompts.

        Raises:
            RequestError: a prompt or a parameter is wrong; none of them has been queued.
        """
        del use_tqdm  # nothing takes time here
        parsed = collect_prompts(
            prompts,
            None,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        params = self._collect_params(sampling_params, len(parsed))
        return self._add(parsed, params, priority, adapters_of(lora_request, len(parsed)))

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queues conversations as `enqueue` queues prompts; the arguments are those of `chat`."""
        prompts = self._render(
            messages,
            lora_request,
            chat_template=chat_template or self._chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        return self.enqueue(
            prompts, sampling_params, lora_request, priority, use_tqdm, tokenization_kwargs, mm_processor_kwargs
        )

    def wait_for_completion(
        self, output_type: type[Any] | tuple[type[Any], ...] | None = None, *, use_tqdm: UseTqdm = True
    ) -> list[Any]:
        """Runs what `enqueue` queued, and returns the outputs in the order of their requests.

        Args:
            output_type: class, or classes, that all outputs must have; None: any.
            use_tqdm: show a progress bar, or a callable that makes one.

        Raises:
            TypeError: an output is of another class.
        """
        outputs = self._run_engine(self.llm_engine.get_num_unfinished_requests(), use_tqdm)
        self._done.clear()
        wrong = [output for output in outputs.values() if output_type and not isinstance(output, output_type)]
        if wrong:
            raise TypeError(f"an output is of type {type(wrong[0]).__name__}, not {output_type}")
        return [outputs[request_id] for request_id in sorted(outputs, key=int)]

    def shutdown(self) -> None:
        """Frees the model and the KV cache now; deleting the object does the same."""
        self._finalizer()

    def _render(
        self, messages: Messages | Sequence[Messages], lora_request: Any = None, **options: Any
    ) -> list[PromptType]:
        """The prompts that the chat template makes of one conversation, or of each of a list; see `render_chat`."""
        models, name = self._need_tokenizer(), self.llm_engine.config.model.served_model_names[0]
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts: list[PromptType] = []
        for conversation, lora in zip(conversations, adapters_of(lora_request, len(conversations)), strict=True):
            tokenizer = self.llm_engine.tokenizers.of(lora) or models
            text = render_chat(tokenizer, conversation, model_name=name, **options)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append(TokensPrompt(prompt=text, prompt_token_ids=token_ids))
        return prompts

    def _check_beams(self, params: Sequence[SamplingParams | PoolingParams]) -> None:
        """Refuses searches that could never run, before anything does."""
        limit = self.llm_engine.config.scheduler.max_num_seqs
        searches = (one for one in params if isinstance(one, SamplingParams) and one.use_beam_search)
        widest = max((one.num_sequences for one in searches), default=0)
        if widest > limit:
            raise RequestError(f"beams of a search must be at most {limit} (--max-num-seqs), got {widest}", "best_of")

    def _make_beam_search_output(self, output: RequestOutput) -> BeamSearchOutput:
        tokenizer = self.llm_engine.tokenizers.of(output.lora_request)
        sequences = []
        for found in output.outputs:
            tokens = [*output.prompt_token_ids, *found.token_ids]
            text = None if tokenizer is None else tokenizer.hf.decode(tokens)
            logprob = found.cumulative_logprob or 0.0
            sequences.append(BeamSearchSequence(tokens, logprob, text, found.finish_reason, found.stop_reason))
        return BeamSearchOutput(sequences)

    def _collect_params(self, params: Params, count: int) -> list[SamplingParams]:
        """Parameters for each prompt, with only final outputs."""
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(each) != count:
            raise RequestError("The lengths of prompts and params must be the same.", "sampling_params")
        return [one.clone(output_kind=RequestOutputKind.FINAL_ONLY) for one in each]

    def _add_and_run(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: UseTqdm,
        priorities: Sequence[int] | None = None,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        request_ids = self._add(prompts, params, priorities, adapters)
        try:
            self._done |= self._run_engine(len(prompts), use_tqdm)
        except BaseException:  # Ctrl-C: leave nothing behind for the next call
            self.llm_engine.abort_request(request_ids)
            raise
        return [self._done.pop(request_id) for request_id in request_ids]

    def _add(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        priorities: Sequence[int] | None = None,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[str]:
        """Queues requests, all or none; their ids."""
        if self.llm_engine.is_paused():
            raise RequestError("The engine sleeps: call wake_up() first.")
        priorities = [0] * len(prompts) if priorities is None else priorities
        if len(priorities) != len(prompts):
            raise RequestError("The lengths of prompts and priority must be the same.", "priority")
        self._check_beams(params)
        request_ids: list[str] = []
        try:
            each = adapters or [None] * len(prompts)
            for prompt, one, priority, lora in zip(prompts, params, priorities, each, strict=True):
                request_id = str(next(self._request_ids))
                self.llm_engine.add_request(request_id, prompt, one, priority=priority, lora_request=lora)
                request_ids.append(request_id)
        except BaseException:
            self.llm_engine.abort_request(request_ids)
            raise
        return request_ids

    def _run_engine(self, count: int, use_tqdm: UseTqdm) -> dict[str, RequestOutput]:
        """Steps until all requests are done; returns outputs by request id, with those not fetched yet."""
        outputs = self._done.copy()
        progress = Progress(count, use_tqdm)
        try:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    outputs[output.request_id] = output
                    progress.count(output)
        finally:
            progress.close()
        return outputs
