"""LMDeploy's configuration records under its names: sampling, engines, and what a pipeline returns.

Fields, their order and their defaults are those of LMDeploy 0.2.0. Fields that later versions added follow, where
they mean the same here. A field whose feature does not exist is refused by name when it is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ascend_vllm.entrypoints.offline.arguments import refuse
from ascend_vllm.errors import ConfigError, RequestError, UnsupportedFlagError
from ascend_vllm.refusals import Refusal, first_refused

# top_k of later versions, which sample only with do_sample
_SAMPLING_TOP_K = 50

# valid values of the engines' configuration fields
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "model_format": (None, "hf", "llama", "awq", "gptq"),
    "eviction_type": ("recompute", "copy"),
    "quant_policy": (0, 4, 8),
}
_POSITIVE = ("tp", "session_len", "max_batch_size", "max_prefill_token_num")
_NOT_NEGATIVE = ("rope_scaling_factor", "num_cpu_blocks", "num_gpu_blocks")
# fields of unsupported features
_REFUSALS: Mapping[str, Refusal] = {
    "model_format": Refusal("checkpoints are read in Hugging Face layout, with unquantised weights", (None, "hf")),
    "use_logn_attn": Refusal("there is no attention with logarithmic scaling", (False,)),
}
# field → the field of `EngineArgs` with the same meaning
_ARGUMENTS: Mapping[str, str] = {
    "tp": "tensor_parallel_size",
    "session_len": "max_model_len",
    "max_batch_size": "max_num_seqs",
    "cache_block_seq_len": "block_size",
    "block_size": "block_size",
    "num_gpu_blocks": "num_gpu_blocks_override",
    "eviction_type": "preemption_mode",
    "eager_mode": "enforce_eager",
    "device_type": "device",
    "quant_policy": "kv_cache_dtype",
    **{name: name for name in ("dtype", "enable_prefix_caching", "download_dir", "revision")},
}
# values with other names in `EngineArgs`; None: the engine decides
_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "num_gpu_blocks": {0: None},
    "eviction_type": {"copy": "swap"},
    "device_type": {"ascend": "npu"},
    # LMDeploy 0.2 calls its cache in 8 bits 4
    "quant_policy": {0: "auto", 4: "int8", 8: "int8"},
}


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
        """Refuses fields of unsupported features.

        Raises:
            RequestError: names the field.
        """
        if self.n != 1:
            raise RequestError(f"n must be 1, a pipeline gives one answer per prompt, got {self.n}.", "n")
        refuse(output_logits=self.output_logits, output_last_hidden_state=self.output_last_hidden_state)


class _EngineConfig:
    """Checks and converts the fields of either backend's configuration, by the tables above."""

    def __post_init__(self) -> None:
        values = vars(self)
        for name in _POSITIVE:
            if values[name] is not None and (type(values[name]) is not int or values[name] < 1):
                raise ConfigError(f"{name} must be a positive integer, got {values[name]!r}.")
        share = values["cache_max_entry_count"]
        if share is not None and not 0 < share < 1:
            raise ConfigError(f"cache_max_entry_count must be between 0 and 1, got {share}.")
        for name, choices in _CHOICES.items():
            if name in values and values[name] not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {values[name]!r}.")
        for name in _NOT_NEGATIVE:
            if values.get(name, 0) < 0:
                raise ConfigError(f"{name} must not be negative, got {values[name]}.")

    def engine_args(self) -> dict[str, Any]:
        """The corresponding fields of `EngineArgs`, except those that depend on the model's sizes.

        Raises:
            UnsupportedFlagError: a field needs a feature that does not exist.
        """
        values = vars(self)
        if (found := first_refused(_REFUSALS, values)) is not None:
            shown = found.name if isinstance(found.value, bool | dict) else f"{found.name} {found.value!r}"
            raise UnsupportedFlagError(shown, found.reason)
        given = {
            name: _VALUES.get(name, {}).get(value, value) for name, value in values.items() if name in _ARGUMENTS
        }
        args = {_ARGUMENTS[name]: value for name, value in given.items() if value is not None}
        if factor := values.get("rope_scaling_factor"):
            args["rope_scaling"] = {"rope_type": "dynamic", "factor": float(factor)}
        return args


@dataclasses.dataclass
class TurbomindEngineConfig(_EngineConfig):
    """Configuration of an engine, with the fields of LMDeploy's turbomind backend.

    Args:
        model_name: name of a built-in chat template; None: the model's own, see `pipeline`.
        model_format: "hf" or None; quantised formats are not supported in this version.
        tp: devices that share each layer, with a worker process for each.
        session_len: most tokens of prompt and output together; None: the model's limit.
        max_batch_size: most sequences that run at the same time.
        cache_max_entry_count: share of memory, between 0 and 1, that the KV cache may take: of what is free once the
            weights are loaded, and never more than all running sequences can fill.
        quant_policy: 8, or 4 as LMDeploy 0.2 has it: a KV cache in 8 bits (`--kv-cache-dtype int8`); 0: in the
            model's dtype.
        rope_scaling_factor: factor of dynamic NTK scaling of rotary positions; 0: as in config.json.
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


@dataclasses.dataclass
class PytorchEngineConfig(_EngineConfig):
    """Configuration of an engine, with the fields of LMDeploy's pytorch backend.

    Args:
        model_name: name of a built-in chat template; "": the model's own, see `pipeline`.
        eviction_type: how sequences are preempted when the KV cache is full: "recompute" computes them again later,
            "copy" moves them to CPU memory and back.
        prefill_interval: no effect; prompts are admitted whenever there is room.
        block_size: tokens of a KV block.
        num_cpu_blocks: KV blocks in CPU memory for "copy"; 0: 4 GiB.
        num_gpu_blocks: KV blocks; 0: by memory.
        adapters: LoRA adapters, their directories by the names that calls have as adapter_name.
        max_prefill_token_num: most prompt tokens of a step; longer prompts are cut.
        cache_max_entry_count: see `TurbomindEngineConfig`; None: the platform decides.
        tp, session_len, max_batch_size, dtype, enable_prefix_caching, quant_policy, download_dir, revision: see
            `TurbomindEngineConfig`.
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


@dataclasses.dataclass
class Response:
    """An answer, or a part of one that is streamed.

    Attributes:
        text: the generated text; while streaming what is new of it.
        generate_token_len: tokens generated so far, without the one that ended the answer.
        finish_reason: "stop" or "length"; None while it goes on.
        input_token_len: tokens of the prompt.
        session_id: serial number of the request in the pipeline.
        token_ids: ids of `text`.
        logprobs: for each token the log-probabilities by id, its own first; None unless requested.
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
