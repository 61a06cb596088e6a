"""LMDeploy's configuration records under its names: sampling, engines, and what a pipeline returns.

Fields, their order and their defaults are those of LMDeploy 0.2.0. Fields that later versions added follow, where
they mean the same here. A field whose feature does not exist is refused by name when it is set.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from ascend_vllm.errors import ConfigError, RequestError, UnsupportedFlagError

# top_k of later versions, which sample only if do_sample says so
_SAMPLING_TOP_K = 50

_EVICTION_MODES = {"recompute": "recompute", "copy": "swap"}
_DEVICES = {"ascend": "npu"}


@dataclasses.dataclass
class GenerationConfig:
    """How a pipeline samples.

    Args:
        n: answers per prompt; only 1.
        max_new_tokens: most tokens to generate.
        top_p: 0 … 1, smallest set of most likely tokens that reaches this probability; 0 is greedy.
        top_k: the k most likely tokens; 1 is greedy, 0 means all.
        temperature: 0 … 2; 0 is greedy.
        repetition_penalty: > 0; above 1 makes tokens of prompt and output less likely.
        ignore_eos: go on after the end of sequence, and after the stop words of the chat template.
        random_seed: makes a call repeat itself; None: a fresh 64-bit seed for every prompt of every call.
        stop_words: each must be one token of the vocabulary, or it is ignored with a warning. Every token whose text
            contains the word ends the output and is not part of it.
        bad_words: likewise; such tokens are never generated.
        do_sample: False: greedy, whatever the other fields say. True: sample, and a top_k of 1 becomes 50, the
            default of the versions that have this field. None: as the other fields say.
        min_p: 0 … 1, drops tokens less likely than this times the most likely one.
        stop_token_ids, bad_token_ids: the same as the words, as ids.
        min_new_tokens: no end before this many tokens.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: only slow tokenizers know it.
        logprobs: return this many most likely tokens' log-probabilities for every token.
        include_stop_str_in_output: keep the stop token in text and ids.
        response_format: what the output must look like, see `guided_options.from_response_format`.
        logits_processors: functions that change the logits of the next token before anything else does: of the ids
            of prompt and output so far, [T] int64, and the logits, [V] float32; they return the logits to use.
        output_logits, output_last_hidden_state: not supported in this version.

    Raises:
        AssertionError: a value is out of range; the text names the field.

    Example::

        GenerationConfig(top_p=0.8, top_k=40, temperature=0.8, max_new_tokens=1024)
    """

    n: int = 1
    max_new_tokens: int = 512
    top_p: float = 1.0
    top_k: int = 1
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    _: dataclasses.KW_ONLY
    do_sample: bool | None = None
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    response_format: dict[str, Any] | None = None
    logits_processors: list[Callable[..., Any]] | None = None
    output_logits: str | None = None
    output_last_hidden_state: str | None = None

    def __post_init__(self) -> None:
        _assert(type(self.n) is int and self.n > 0, "n is not a positive integer")
        _assert(
            type(self.max_new_tokens) is int and self.max_new_tokens > 0,
            f"max_new_tokens must be a positive integer, got {self.max_new_tokens!r}",
        )
        _assert(0 <= self.top_p <= 1, f"top_p should be in range [0, 1], but found {self.top_p}")
        _assert(type(self.top_k) is int, f"top_k must be an integer, got {self.top_k!r}")
        _assert(self.top_k >= 0, "top_k can not be a negative integer")
        _assert(0 <= self.temperature <= 2, f"temperature should be in range [0, 2], but found {self.temperature}")
        _assert(0 <= self.min_p <= 1, f"min_p should be in range [0, 1], but found {self.min_p}")
        _assert(
            self.random_seed is None or type(self.random_seed) is int,
            f"random_seed must be an integer, got {self.random_seed!r}",
        )
        if self.do_sample and self.top_k == 1:
            self.top_k = _SAMPLING_TOP_K

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.do_sample is False or self.top_k == 1 or self.top_p == 0 or self.temperature == 0

    def check_supported(self) -> None:
        """Refuses what is asked for and does not exist.

        Raises:
            RequestError: names the field.
        """
        if self.n != 1:
            raise RequestError(f"n must be 1, a pipeline gives one answer per prompt, got {self.n}.", "n")
        for name in ("output_logits", "output_last_hidden_state"):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported in this version.", name)


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What a backend's configuration means to the engine.

    Attributes:
        args: fields of `EngineArgs`.
        kv_cache_share: part of the free memory, 0 … 1, that the KV cache may take; None: the platform decides.
        num_cpu_blocks: KV blocks in CPU memory for swapping; 0: the engine decides.
        max_prefill_tokens: most prompt tokens of a step; longer prompts are cut. None: the engine decides.
    """

    args: dict[str, Any]
    kv_cache_share: float | None = None
    num_cpu_blocks: int = 0
    max_prefill_tokens: int | None = None


@dataclasses.dataclass
class TurbomindEngineConfig:
    """Configuration of an engine, with the fields of LMDeploy's turbomind backend.

    Args:
        model_name: name of a built-in chat template; None: the model's own, see `pipeline`.
        model_format: "hf" or None; quantised formats are not supported in this version.
        tp: devices that share each layer. This version computes on one, with a warning and the same results.
        session_len: most tokens of prompt and output together; None: the model's limit.
        max_batch_size: most sequences that run at the same time.
        cache_max_entry_count: share of memory, between 0 and 1, that the KV cache may take: of what is free once the
            weights are loaded, and never more than all running sequences can fill.
        quant_policy: 0; a quantised KV cache is not supported in this version.
        rope_scaling_factor: factor of dynamic NTK scaling of rotary positions; 0: as the model says.
        use_logn_attn: not supported in this version.
        dtype: "auto", "float16", "bfloat16" or "float32".
        cache_block_seq_len: tokens of a KV block; None: the device's fastest size.
        enable_prefix_caching: keep the KV cache of prompts for later ones that begin alike.
        max_prefill_token_num: most prompt tokens of a step; None: the engine decides.
        download_dir, revision: where a model of the hub is kept, and which version.

    Raises:
        ConfigError: a value is out of range; the text names the field.
    """

    model_name: str | None = None
    model_format: str | None = None
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int = 128
    cache_max_entry_count: float = 0.5
    quant_policy: int = 0
    rope_scaling_factor: float = 0.0
    use_logn_attn: bool = False
    _: dataclasses.KW_ONLY
    dtype: str = "auto"
    cache_block_seq_len: int | None = None
    enable_prefix_caching: bool = False
    max_prefill_token_num: int | None = None
    download_dir: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        _check_common(self.tp, self.session_len, self.max_batch_size, self.max_prefill_token_num)
        _check_share(self.cache_max_entry_count)
        _check_choice("model_format", self.model_format, (None, "hf", "llama", "awq", "gptq"))
        _check_choice("quant_policy", self.quant_policy, (0, 4, 8))
        if self.rope_scaling_factor < 0:
            raise ConfigError(f"rope_scaling_factor must not be negative, got {self.rope_scaling_factor}.")

    def settings(self) -> EngineSettings:
        """What it means to the engine.

        Raises:
            UnsupportedFlagError: a field asks for a feature that does not exist.
        """
        if self.model_format not in (None, "hf"):
            reason = "checkpoints are read in Hugging Face layout, with unquantised weights"
            raise UnsupportedFlagError(f"model_format {self.model_format!r}", reason)
        _refuse_quant_policy(self.quant_policy)
        if self.use_logn_attn:
            raise UnsupportedFlagError("use_logn_attn", "there is no attention with logarithmic scaling")
        args = _common_args(self)
        if self.rope_scaling_factor:
            args["rope_scaling"] = {"rope_type": "dynamic", "factor": float(self.rope_scaling_factor)}
        if self.cache_block_seq_len is not None:
            args["block_size"] = self.cache_block_seq_len
        return EngineSettings(
            args, kv_cache_share=self.cache_max_entry_count, max_prefill_tokens=self.max_prefill_token_num
        )


@dataclasses.dataclass
class PytorchEngineConfig:
    """Configuration of an engine, with the fields of LMDeploy's pytorch backend.

    Args:
        model_name: name of a built-in chat template; "": the model's own, see `pipeline`.
        tp: devices that share each layer. This version computes on one, with a warning and the same results.
        session_len: most tokens of prompt and output together; None: the model's limit.
        max_batch_size: most sequences that run at the same time.
        eviction_type: what makes room when the KV cache is full: "recompute" computes a sequence again later, "copy"
            moves it to CPU memory and back.
        prefill_interval: no effect; prompts are let in whenever there is room.
        block_size: tokens of a KV block.
        num_cpu_blocks: KV blocks in CPU memory for "copy"; 0: 4 GiB.
        num_gpu_blocks: KV blocks; 0: by memory.
        adapters: LoRA adapters; not supported in this version.
        max_prefill_token_num: most prompt tokens of a step; longer prompts are cut.
        cache_max_entry_count: see `TurbomindEngineConfig`; None: the platform decides.
        dtype, enable_prefix_caching, quant_policy, download_dir, revision: see `TurbomindEngineConfig`.
        device_type: "ascend" or "cpu"; None: an NPU if there is one, else the CPU.
        eager_mode: no captured graphs.

    Raises:
        ConfigError: a value is out of range; the text names the field.
    """

    model_name: str = ""
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int = 128
    eviction_type: str = "recompute"
    prefill_interval: int = 16
    block_size: int = 64
    num_cpu_blocks: int = 0
    num_gpu_blocks: int = 0
    adapters: dict[str, str] | None = None
    max_prefill_token_num: int = 16384
    _: dataclasses.KW_ONLY
    cache_max_entry_count: float | None = None
    dtype: str = "auto"
    enable_prefix_caching: bool = False
    quant_policy: int = 0
    download_dir: str | None = None
    revision: str | None = None
    device_type: str | None = None
    eager_mode: bool = False

    def __post_init__(self) -> None:
        _check_common(self.tp, self.session_len, self.max_batch_size, self.max_prefill_token_num)
        if self.cache_max_entry_count is not None:
            _check_share(self.cache_max_entry_count)
        _check_choice("eviction_type", self.eviction_type, tuple(_EVICTION_MODES))
        _check_choice("quant_policy", self.quant_policy, (0, 4, 8))
        for name in ("num_cpu_blocks", "num_gpu_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}.")

    def settings(self) -> EngineSettings:
        """What it means to the engine.

        Raises:
            UnsupportedFlagError: a field asks for a feature that does not exist.
        """
        if self.adapters:
            raise UnsupportedFlagError("adapters", "LoRA is not available in this version")
        _refuse_quant_policy(self.quant_policy)
        args = _common_args(self)
        args |= {
            "preemption_mode": _EVICTION_MODES[self.eviction_type],
            "block_size": self.block_size,
            "enforce_eager": self.eager_mode,
        }
        if self.num_gpu_blocks:
            args["num_gpu_blocks_override"] = self.num_gpu_blocks
        if self.device_type is not None:
            args["device"] = _DEVICES.get(self.device_type, self.device_type)
        return EngineSettings(
            args,
            kv_cache_share=self.cache_max_entry_count,
            num_cpu_blocks=self.num_cpu_blocks,
            max_prefill_tokens=self.max_prefill_token_num,
        )


@dataclasses.dataclass
class Response:
    """An answer, or a piece of one.

    Attributes:
        text: the generated text; while streaming what is new of it.
        generate_token_len: tokens generated so far, without the one that ended the answer.
        finish_reason: "stop" or "length"; None while it goes on.
        input_token_len: tokens of the prompt.
        session_id: number of the request in the pipeline's life.
        token_ids: ids of `text`.
        logprobs: for each token the log-probabilities by id, itself first; None unless asked for.
        index: place of the prompt in the call's list.
    """

    text: str
    generate_token_len: int
    finish_reason: str | None = None
    input_token_len: int = 0
    session_id: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    index: int = 0

    def __repr__(self) -> str:
        """`text='…'`, then the other fields, one to a line."""
        return "\n".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))


def _assert(condition: bool, text: str) -> None:
    # LMDeploy's callers catch AssertionError; an assert statement would be gone under -O
    if not condition:
        raise AssertionError(text)


def _check_common(tp: int, session_len: int | None, max_batch_size: int, max_prefill: int | None) -> None:
    for name, value in (
        ("tp", tp),
        ("session_len", session_len),
        ("max_batch_size", max_batch_size),
        ("max_prefill_token_num", max_prefill),
    ):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} must be a positive integer, got {value!r}.")


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ConfigError(f"cache_max_entry_count must be between 0 and 1, got {share}.")


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _refuse_quant_policy(quant_policy: int) -> None:
    if quant_policy:
        raise UnsupportedFlagError(f"quant_policy {quant_policy}", "the KV cache keeps the model's number format")


def _common_args(config: TurbomindEngineConfig | PytorchEngineConfig) -> dict[str, Any]:
    """Fields of `EngineArgs` that both backends set."""
    if config.tp > 1:
        warnings.warn(
            f"tp={config.tp}: this version computes on one device; the results are the same.",
            UserWarning,
            stacklevel=4,
        )
    return {
        "max_model_len": config.session_len,
        "max_num_seqs": config.max_batch_size,
        "dtype": config.dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "download_dir": config.download_dir,
        "revision": config.revision,
    }
