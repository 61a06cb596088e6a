"""LMDeploy's `pipeline`: prompts in, responses out, on this project's engine.

Example::

    from ascend_vllm import GenerationConfig, pipeline

    pipe = pipeline("/models/internlm2-chat-7b")
    print(pipe(["Hi, pls intro yourself", "Shanghai is"]))
    print(pipe("Hi", gen_config=GenerationConfig(max_new_tokens=64)).text)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import pathlib
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tqdm

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.feature_checks import LORA_RANKS
from ascend_vllm.args.hf_files import weight_bytes
from ascend_vllm.config.cache import kv_cache_specs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.input_processor import TokensPrompt
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.entrypoints.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from ascend_vllm.entrypoints.lmdeploy.config import (
    GenerationConfig,
    PytorchEngineConfig,
    Response,
    TurbomindEngineConfig,
)
from ascend_vllm.entrypoints.lmdeploy.requests import SharedRequests
from ascend_vllm.entrypoints.lmdeploy.templates import ChatTemplateConfig, PromptTemplate, choose_template
from ascend_vllm.entrypoints.offline.guided_options import from_response_format
from ascend_vllm.errors import ConfigError, ModelLoadError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.model_files import read_json
from ascend_vllm.outputs import PositionLogprobs, RequestOutput
from ascend_vllm.platforms.facts import probe_npus
from ascend_vllm.platforms.host import available_memory_bytes
from ascend_vllm.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)

Messages = Sequence[Mapping[str, Any]]
Prompts = str | Messages | Sequence[str] | Sequence[Messages]
BackendConfig = TurbomindEngineConfig | PytorchEngineConfig

_GIB = 1 << 30
# the engine takes seeds as signed 64-bit integers
_SEED_MASK = (1 << 63) - 1
_LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "WARN", "INFO", "DEBUG")


def pipeline(
    model_path: str,
    model_name: str | None = None,
    backend_config: BackendConfig | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    log_level: str = "ERROR",
    **kwargs: Any,
) -> Pipeline:
    """Loads a model and makes it callable, as LMDeploy 0.2.0's function of this name does.

    Args:
        model_path: directory or hub name of a model; "demo" trains and serves the small demo model.
        model_name: name of a built-in chat template. None: the model's own template, or else the built-in one that
            fits the model's path.
        backend_config: a TurbomindEngineConfig or a PytorchEngineConfig; both configure the same engine.
        chat_template_config: the chat template; decides over the names.
        log_level: least level of the package's log messages that are shown: "ERROR", "WARNING", "INFO", "DEBUG".
        kwargs: any field of `EngineArgs`, which decides over backend_config; also `tp`, LMDeploy's older way to say
            backend_config.tp.

    Raises:
        AssertionError: backend_config is of another class.
        TypeError: an unknown keyword.
        ConfigError: a value, or a combination of values, is wrong or not supported.
        ModelLoadError: the model's directory cannot be served.

    Example::

        pipe = pipeline("internlm/internlm-chat-7b", backend_config=TurbomindEngineConfig(session_len=4096))
        response = pipe(["Hi, pls intro yourself", "Shanghai is"])
    """
    if log_level not in _LOG_LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(_LOG_LEVELS)}, got {log_level!r}.")
    logging.getLogger("ascend_vllm").setLevel(log_level)
    backend = TurbomindEngineConfig() if backend_config is None else backend_config
    if not isinstance(backend, TurbomindEngineConfig | PytorchEngineConfig):
        raise AssertionError(
            "Please use TurbomindEngineConfig imported from lmdeploy.messages for turbomind backend, "
            f"or PytorchEngineConfig; got {type(backend).__name__}"
        )
    if "tp" in kwargs:
        warnings.warn(
            "The argument tp is deprecated: use backend_config=TurbomindEngineConfig(tp=...).",
            DeprecationWarning,
            stacklevel=2,
        )
        backend = dataclasses.replace(backend, tp=kwargs.pop("tp"))
    directory = ensure_demo_model() if model_path == DEMO_MODEL_NAME else model_path
    engine = LLMEngine(_make_engine_config(directory, backend, kwargs))
    try:
        if engine.tokenizer is None:
            raise ConfigError("skip_tokenizer_init cannot be used with a pipeline: it needs a tokenizer.")
        template = choose_template(
            chat_template_config, model_name or backend.model_name, model_path, engine.tokenizer
        )
        return Pipeline(engine, engine.tokenizer, template, _adapters_of(backend))
    except BaseException:
        engine.shutdown()
        raise


class Pipeline:
    """A model that answers prompts; `pipeline` makes it.

    Calls may come from several threads, and streams may be interleaved: all share the engine's steps.

    Args:
        engine: runs the model; shut down with this object.
        tokenizer: the engine's.
        chat_template: makes prompts of strings and messages.
        adapters: directories of LoRA adapters by their names.

    Attributes:
        llm_engine: the engine underneath.
        chat_template: makes prompts of strings and messages.
        session_len: most tokens of prompt and output together.
    """

    def __init__(
        self,
        engine: LLMEngine,
        tokenizer: Tokenizer,
        chat_template: PromptTemplate,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.llm_engine = engine
        self._adapters = {
            name: LoRARequest(name, number, path) for number, (name, path) in enumerate((adapters or {}).items(), 1)
        }
        self.chat_template = chat_template
        self.session_len = engine.max_model_len
        self._tokenizer = tokenizer
        self._words = WordTokens(tokenizer, engine.config.model.vocab_size)
        # stop words of a template that are not in the vocabulary are ignored
        self._template_stop_ids = [
            id_
            for word in chat_template.stop_words
            if len(self._words.encode(word)) == 1
            for id_ in self._words.find(word)
        ]
        self._requests = SharedRequests(engine)
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, engine.shutdown)

    def __call__(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        request_output_len: int = 512,
        top_k: int = 40,
        top_p: float = 0.8,
        temperature: float = 0.8,
        repetition_penalty: float = 1.0,
        ignore_eos: bool = False,
        do_preprocess: bool = True,
        *,
        use_tqdm: bool = False,
        adapter_name: str | None = None,
    ) -> Response | list[Response]:
        """Answers a prompt, or each of a list of prompts.

        Args:
            prompts: a string, or messages in OpenAI's form (a list of {"role", "content"}); or a list of either.
            gen_config: for all prompts, or one for each. None: the sampling that the following arguments say, which
                are ignored otherwise.
            request_output_len: most tokens to generate.
            top_k, top_p, temperature, repetition_penalty, ignore_eos: see `GenerationConfig`.
            do_preprocess: put strings into the chat template as a user's message; False: take them as they are.
            use_tqdm: show a progress bar.
            adapter_name: of the LoRA adapter to answer with, see `PytorchEngineConfig`; None: the model as it is.

        Returns:
            A response, or for a list of prompts one for each, in their order. A prompt that has no room for
            max_new_tokens below session_len gives an empty one with finish_reason "length".

        Raises:
            AssertionError: stop_words or bad_words is not a list of strings.
            RequestError: a prompt or a parameter is wrong; no prompt has been run.
        """
        if gen_config is None:
            gen_config = GenerationConfig(
                max_new_tokens=request_output_len,
                top_k=top_k,
                top_p=top_p,
                temperature=temperature,
                repetition_penalty=repetition_penalty,
                ignore_eos=ignore_eos,
            )
        return self.batch_infer(prompts, gen_config, do_preprocess, use_tqdm=use_tqdm, adapter_name=adapter_name)

    def batch_infer(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        do_preprocess: bool = True,
        *,
        use_tqdm: bool = False,
        adapter_name: str | None = None,
    ) -> Response | list[Response]:
        """Answers a prompt, or each of a list of prompts; without gen_config greedily.

        The arguments, the result and the errors are those of calling the pipeline.
        """
        is_single = _is_single(prompts)
        lora = self._adapter(adapter_name)
        jobs = self._make_jobs(prompts, gen_config, do_preprocess, RequestOutputKind.FINAL_ONLY)
        responses = [job.make_empty_response() for job in jobs]
        with tqdm.tqdm(total=len(jobs), desc="Processed prompts", disable=not use_tqdm) as progress:
            progress.update(sum(job.is_too_long for job in jobs))
            for response in self._run(jobs, lora):
                responses[response.index] = response
                progress.update(1)
        return responses[0] if is_single else responses

    def stream_infer(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        do_preprocess: bool = True,
        *,
        adapter_name: str | None = None,
    ) -> Iterator[Response]:
        """Streams the answers to prompts; without gen_config greedily.

        The arguments and the errors are those of calling the pipeline.

        Returns:
            An iterator. Each response holds what is new of the answer to prompt number `index`; the last one of each
            prompt has a finish_reason. Leaving it ends the requests.

        Example::

            for response in pipe.stream_infer("Hi"):
                print(response.text, end="", flush=True)
        """
        lora = self._adapter(adapter_name)
        return self._stream(self._make_jobs(prompts, gen_config, do_preprocess, RequestOutputKind.DELTA), lora)

    def close(self) -> None:
        """Frees the model and the KV cache now; deleting the object does the same."""
        self._finalizer()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _adapter(self, name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(f"There is no adapter {name!r}; the pipeline's adapters: {known}.", "adapter_name")
        return self._adapters[name]

    def _stream(self, jobs: list[_Job], lora: LoRARequest | None) -> Iterator[Response]:
        yield from (job.make_empty_response() for job in jobs if job.is_too_long)
        yield from self._run(jobs, lora)

    def _run(self, jobs: list[_Job], lora: LoRARequest | None) -> Iterator[Response]:
        """The engine's outputs, as they come."""
        by_id = {str(job.number): job for job in jobs if not job.is_too_long}
        requests = {request_id: (job.prompt, job.params) for request_id, job in by_id.items()}
        with contextlib.closing(self._requests.run(requests, lora)) as outputs:
            for output in outputs:
                yield by_id[output.request_id].make_response(output)

    def _make_jobs(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None,
        do_preprocess: bool,
        kind: RequestOutputKind,
    ) -> list[_Job]:
        listed = _list_prompts(prompts)
        given: Any = GenerationConfig() if gen_config is None else gen_config
        configs = list(given) if isinstance(given, list | tuple) else [given] * len(listed)
        if len(configs) != len(listed):
            raise RequestError("The lengths of prompts and gen_config must be the same.", "gen_config")
        for config in configs:
            if not isinstance(config, GenerationConfig):
                raise RequestError(
                    f"gen_config must be a GenerationConfig, but is of type {type(config).__name__}", "gen_config"
                )
        # tokens of words are looked up once per configuration, not once per prompt
        params = {id(config): self._make_params(config, kind) for config in configs}
        jobs = []
        for index, (prompt, config) in enumerate(zip(listed, configs, strict=True)):
            seed = random.getrandbits(63) if config.random_seed is None else config.random_seed & _SEED_MASK
            jobs.append(
                _Job(
                    index,
                    next(self._numbers),
                    self._make_prompt(prompt, do_preprocess),
                    params[id(config)].clone(seed=None if config.is_greedy else seed),
                    self.session_len,
                )
            )
        return jobs

    def _make_prompt(self, prompt: Any, do_preprocess: bool) -> TokensPrompt:
        is_text = isinstance(prompt, str)
        if not do_preprocess and not is_text:
            raise RequestError("do_preprocess must be True for messages: they need a chat template.", "do_preprocess")
        as_is = is_text and (not do_preprocess or self.chat_template.is_completion)
        text = prompt if as_is else self.chat_template.messages2prompt(prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompts hold text that is not valid Unicode: {error}", "prompts") from None
        adds_special_tokens = as_is or self.chat_template.adds_special_tokens
        token_ids = self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        if not token_ids:
            raise RequestError("Prompt cannot be empty", "prompts")
        return TokensPrompt(prompt=text, prompt_token_ids=token_ids)

    def _make_params(self, config: GenerationConfig, kind: RequestOutputKind) -> SamplingParams:
        """The engine's sampling parameters, all but the seed.

        Raises:
            AssertionError, RequestError: a field is wrong or not supported.
        """
        config.check_supported()
        stop_ids = [*self._ids_of("stop", config.stop_words, config.stop_token_ids)]
        if not config.ignore_eos:
            stop_ids += self._template_stop_ids
        bad_ids = self._ids_of("bad", config.bad_words, config.bad_token_ids)
        if len(bad_ids) >= self.llm_engine.config.model.vocab_size:
            raise RequestError("bad_words leave no token that could be generated.", "bad_words")
        try:
            return SamplingParams(
                max_tokens=config.max_new_tokens,
                min_tokens=config.min_new_tokens or 0,
                temperature=0.0 if config.is_greedy else config.temperature,
                top_p=1.0 if config.is_greedy else config.top_p,
                top_k=config.top_k,
                min_p=config.min_p,
                repetition_penalty=config.repetition_penalty,
                ignore_eos=config.ignore_eos,
                stop_token_ids=list(dict.fromkeys(stop_ids)),
                # a token whose logit is minus infinity stays impossible
                logit_bias=dict.fromkeys(bad_ids, -math.inf) or None,
                logprobs=config.logprobs,
                logits_processors=[_of_ids(one) for one in config.logits_processors or []] or None,
                structured_outputs=from_response_format(config.response_format),
                skip_special_tokens=config.skip_special_tokens,
                spaces_between_special_tokens=config.spaces_between_special_tokens,
                include_stop_str_in_output=config.include_stop_str_in_output,
                output_kind=kind,
            )
        except RequestError:
            raise
        except (TypeError, ValueError) as error:
            raise RequestError(f"gen_config: {error}", "gen_config") from error

    def _ids_of(self, kind: str, words: Any, token_ids: Any) -> list[int]:
        """Ids that stop_words and stop_token_ids mean together; likewise "bad"."""
        found = []
        if words is not None:
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise AssertionError(f"{kind}_words must be a list of str but got {type(words)}")
            for word in words:
                found += self._words.find(word)
        if token_ids is not None:
            size = self.llm_engine.config.model.vocab_size
            if not isinstance(token_ids, list) or not all(
                type(token_id) is int and 0 <= token_id < size for token_id in token_ids
            ):
                raise RequestError(
                    f"{kind}_token_ids must be a list of token ids below {size}, got {token_ids!r}",
                    f"{kind}_token_ids",
                )
            found += token_ids
        return list(dict.fromkeys(found))


def _of_ids(processor: Callable[..., Any]) -> Callable[[list[int], list[int], Any], Any]:
    """A function of LMDeploy's, of all ids as one tensor, in the form of the engine's.

    Raises:
        RequestError: it is no function.
    """
    if not callable(processor):
        raise RequestError("logits_processors must be a list of functions", "logits_processors")
    # the engine runs in this process, and has torch loaded
    import torch

    def of_lists(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> Any:
        return processor(torch.tensor([*prompt_ids, *output_ids]), logits)

    return of_lists


@dataclasses.dataclass
class _Job:
    """A prompt of a call.

    Attributes:
        index: of the prompt in the call.
        number: serial number of the request in the pipeline.
        prompt: text and ids.
        params: how to sample.
        session_len: most tokens of prompt and output together.
        num_tokens: generated so far.
    """

    index: int
    number: int
    prompt: TokensPrompt
    params: SamplingParams
    session_len: int
    num_tokens: int = 0

    @property
    def is_too_long(self) -> bool:
        """Whether prompt and longest output exceed session_len: such a prompt is not run."""
        return len(self.prompt["prompt_token_ids"]) + (self.params.max_tokens or 0) >= self.session_len

    def make_empty_response(self) -> Response:
        """The response to a prompt that is too long."""
        if self.is_too_long:
            logger.warning(
                "Prompt %d is not run: its %d tokens and max_new_tokens %d must stay below session_len %d.",
                self.index,
                len(self.prompt["prompt_token_ids"]),
                self.params.max_tokens,
                self.session_len,
            )
        return Response("", 0, "length", len(self.prompt["prompt_token_ids"]), self.number, index=self.index)

    def make_response(self, output: RequestOutput) -> Response:
        """The response for an output of the engine: the new part of the answer, or all of it."""
        (found,) = output.outputs
        token_ids = found.token_ids
        # no stop strings are used, so that "stop" means that the last token ended the output
        if found.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        self.num_tokens += len(token_ids)
        return Response(
            found.text,
            self.num_tokens,
            found.finish_reason,
            len(output.prompt_token_ids),
            self.number,
            token_ids,
            None if found.logprobs is None else list(map(_by_id, found.logprobs[: len(token_ids)])),
            self.index,
        )


class WordTokens:
    """Looks up the tokens of a vocabulary that contain a word.

    Args:
        tokenizer: of the model.
        vocab_size: ids that the model can generate.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # made when the first word is looked up: a large vocabulary takes a second
        self._texts: dict[int, str] = {}
        self._found: dict[str, list[int]] = {}

    def encode(self, word: str) -> list[int]:
        return self._tokenizer.encode(word, add_special_tokens=False)

    def find(self, word: str) -> list[int]:
        """Ids of all tokens whose text contains the word, if the word is a token; else none, with a warning."""
        if word not in self._found:
            self._found[word] = self._find(word)
        return self._found[word]

    def _find(self, word: str) -> list[int]:
        ids = self.encode(word)
        if len(ids) != 1:
            logger.warning("The word %r is %d tokens, %s: only words of one token can be used.", word, len(ids), ids)
            return []
        if not self._texts:
            known = sorted(id_ for id_ in self._tokenizer.hf.get_vocab().values() if id_ < self._vocab_size)
            self._texts = {id_: self._tokenizer.token_text(id_) for id_ in known}
        containing = [id_ for id_, text in self._texts.items() if word in text]
        # the token itself, in case the tokenizer has normalised the word
        return list(dict.fromkeys([*(id_ for id_ in ids if id_ < self._vocab_size), *containing]))


def _make_engine_config(model: str, backend: BackendConfig, overrides: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration: converts LMDeploy's memory shares and blocks to bytes for this model."""
    adapters = _adapter_args(_adapters_of(backend))
    given = {"model": model, "disable_log_stats": True, **backend.engine_args(), **adapters, **overrides}
    args = EngineArgs(**given)
    config = args.create_engine_config()
    sizes: dict[str, Any] = {}
    if backend.max_prefill_token_num is not None:
        sizes["max_num_batched_tokens"] = max(backend.max_prefill_token_num, config.scheduler.max_num_seqs)
        if sizes["max_num_batched_tokens"] < config.scheduler.max_model_len:
            sizes["enable_chunked_prefill"] = True
    has_size = config.cache.num_gpu_blocks_override is not None or config.cache.kv_cache_memory_bytes is not None
    if backend.cache_max_entry_count is not None and not has_size:
        sizes["kv_cache_memory_bytes"] = _kv_cache_bytes(config, backend.cache_max_entry_count)
    if isinstance(backend, PytorchEngineConfig) and backend.num_cpu_blocks:
        sizes["swap_space"] = backend.num_cpu_blocks * _block_bytes(config) / _GIB
    sizes = {name: value for name, value in sizes.items() if name not in overrides}
    return dataclasses.replace(args, **sizes).create_engine_config() if sizes else config


def _adapters_of(backend: BackendConfig) -> Mapping[str, str]:
    """The directories of a backend's adapters, by their names."""
    return (backend.adapters or {}) if isinstance(backend, PytorchEngineConfig) else {}


def _adapter_args(adapters: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `EngineArgs` with which all adapters can be in use at once.

    Raises:
        ConfigError: the configuration of an adapter cannot be read, or its rank is too large.
    """
    if not adapters:
        return {}
    largest = 1
    for name, path in adapters.items():
        try:
            config = read_json(pathlib.Path(path) / "adapter_config.json", dict)
        except ModelLoadError as error:
            raise ConfigError(f"adapters {name!r}: {error}") from error
        patterns = config.get("rank_pattern") or {}
        ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
        largest = max(largest, *(rank for rank in ranks if isinstance(rank, int)), 1)
    fitting = next((rank for rank in LORA_RANKS if rank >= largest), None)
    if fitting is None:
        raise ConfigError(f"adapters: the largest rank is {largest}, {LORA_RANKS[-1]} is possible at most.")
    count = len(adapters)
    return {"enable_lora": True, "max_loras": count, "max_cpu_loras": count, "max_lora_rank": fitting}


def _kv_cache_bytes(config: EngineConfig, share: float) -> int:
    """Size of the KV cache per worker: together they take a share of the memory that the weights leave free.

    Without prefix caching it is at most what all sequences fill.
    """
    blocks_per_sequence = math.ceil(config.scheduler.max_model_len / config.cache.block_size)
    num_blocks = int(_free_bytes(config) * share) // _block_bytes(config)
    if not config.cache.enable_prefix_caching:
        num_blocks = min(num_blocks, config.scheduler.max_num_seqs * blocks_per_sequence)
    return max(num_blocks, 1) * _block_bytes(config)


def _free_bytes(config: EngineConfig) -> int:
    """A worker's part of the memory that the weights leave free, of its NPU or of this machine."""
    num_workers = config.parallel.local_world_size
    weights = weight_bytes(config.model.model) // num_workers
    if config.device.device == "npu":
        return max(0, probe_npus(with_memory=True).free_bytes - weights)
    return max(0, available_memory_bytes() // num_workers - weights)


def _block_bytes(config: EngineConfig) -> int:
    """Bytes of a worker's part of a KV block, in all layers."""
    specs = kv_cache_specs(config.model, config.cache, config.parallel.tensor_parallel_size)
    return sum(spec.block_bytes for spec in specs)


def _is_single(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them."""
    return isinstance(prompts, str) or (
        isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], Mapping)
    )


def _list_prompts(prompts: Any) -> list[Any]:
    listed = [prompts] if _is_single(prompts) else prompts
    if not isinstance(listed, list | tuple):
        raise RequestError(
            f"prompts must be a string, messages or a list of these, but is of type {type(prompts).__name__}",
            "prompts",
        )
    for prompt in listed:
        if isinstance(prompt, tuple) and not all(isinstance(part, Mapping) for part in prompt):
            raise RequestError(
                "prompts hold a tuple of text and images, but this is not a multimodal model", "prompts"
            )
        if not isinstance(prompt, str | list | tuple):
            raise RequestError(
                f"a prompt must be a string or a list of messages, but is of type {type(prompt).__name__}", "prompts"
            )
    return list(listed)


def _by_id(position: PositionLogprobs) -> dict[int, float]:
    return {id_: entry.logprob for id_, entry in position.items()}
