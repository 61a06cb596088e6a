"""Flags of features on top of plain generation: adapters, speculation, images, output grammars."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ascend_vllm.args.fields import flag
from ascend_vllm.args.tables.model import QUANTIZATIONS

_EXACT_ONLY = "rejection_sampler is the only rule in this version"
_POOL = "texts are tokenised in threads beside the event loop, without a pool of processes"


@dataclasses.dataclass
class AdapterArgs:
    """LoRA adapters."""

    SECTION: ClassVar[str] = "Adapters"

    enable_lora: bool = flag(
        False, "Lets requests choose LoRA adapters, small sets of weights that change what the model has learned."
    )
    max_loras: int = flag(1, "The largest number of different LoRA adapters in one batch.")
    max_lora_rank: int = flag(16, "The largest rank that a LoRA adapter may have.")
    lora_extra_vocab_size: int = flag(
        256,
        "The largest number of tokens that a LoRA adapter may add to the vocabulary.",
        unsupported="adapters with tokens of their own are not available in this version",
    )
    lora_dtype: str = flag(
        "auto",
        "The number format of LoRA adapters; auto is the format of the model.",
        choices=("auto", "float16", "bfloat16", "float32"),
    )
    long_lora_scaling_factors: str | None = flag(
        None,
        "Position scales for which long-context LoRA adapters were trained, separated by commas.",
        unsupported="adapters for longer contexts are not available in this version",
    )
    default_mm_loras: dict[str, Any] | None = flag(
        None,
        "The LoRA adapter of each kind of input, such as audio, for requests that have it and name no other.",
        unsupported="no kind of input has an adapter of its own; requests name one as their model",
    )
    max_cpu_loras: int | None = flag(None, "The largest number of LoRA adapters that are kept in CPU memory.")
    fully_sharded_loras: bool = flag(
        False,
        "Shares all of the LoRA computation among the devices, not half of it.",
        unsupported="ranks share half of the computation of LoRA adapters in this version",
    )


@dataclasses.dataclass
class PromptAdapterArgs:
    """Prompt adapters."""

    SECTION: ClassVar[str] = "Adapters"
    UNSUPPORTED: ClassVar[str] = "prompt adapters are not available in this version"

    enable_prompt_adapter: bool = flag(
        False, "Lets requests choose prompt adapters, learned tokens that are put before the prompt."
    )
    max_prompt_adapters: int = flag(1, "The largest number of different prompt adapters in one batch.")
    max_prompt_adapter_token: int = flag(0, "The largest number of tokens that a prompt adapter may have.")


@dataclasses.dataclass
class SpeculativeArgs:
    """Guessing tokens ahead with something faster than the model."""

    SECTION: ClassVar[str] = "Speculative decoding"

    speculative_config: dict[str, Any] | None = flag(
        None,
        "All settings of speculative decoding in one JSON object, with vLLM's keys: method, model, "
        "num_speculative_tokens, prompt_lookup_max, prompt_lookup_min and others.",
        example='--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    )
    speculative_model: str | None = flag(
        None,
        "A smaller model that guesses tokens ahead, which the large model then checks several at a time. [ngram] "
        "guesses without a model, from text that occurs again.",
        example="--speculative-model [ngram] --num-speculative-tokens 4 --ngram-prompt-lookup-max 4",
    )
    speculative_model_quantization: str | None = flag(
        None,
        "How the weights of the guessing model are quantised.",
        choices=QUANTIZATIONS,
    )
    num_speculative_tokens: int | None = flag(None, "The number of tokens that are guessed ahead in each step.")
    speculative_disable_mqa_scorer: bool = flag(
        False,
        "Checks guessed tokens as separate sequences instead of all in one.",
        no_effect="guessed tokens are always checked in one pass over their sequence",
    )
    speculative_draft_tensor_parallel_size: int | None = flag(
        None,
        "The number of devices that share the guessing model.",
        short=("-spec-draft-tp",),
    )
    speculative_max_model_len: int | None = flag(
        None, "The longest sequence for which tokens are guessed; longer ones go on without guesses."
    )
    speculative_disable_by_batch_size: int | None = flag(
        None,
        "Requests that arrive while so many or more are running get no guesses. Without it, measurements decide when "
        "guesses pay.",
    )
    ngram_prompt_lookup_max: int | None = flag(
        None, "The most last tokens that are looked up in the text so far to guess what follows them."
    )
    ngram_prompt_lookup_min: int | None = flag(
        None, "The fewest last tokens that are looked up in the text so far to guess what follows them."
    )
    spec_decoding_acceptance_method: str = flag(
        "rejection_sampler",
        "The rule by which guessed tokens are accepted; with rejection_sampler the answers are those without "
        "guesses, token for token.",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
        unsupported=_EXACT_ONLY,
    )
    typical_acceptance_sampler_posterior_threshold: float | None = flag(
        None,
        "The lowest probability at which the typical acceptance rule takes a guessed token.",
        unsupported=_EXACT_ONLY,
    )
    typical_acceptance_sampler_posterior_alpha: float | None = flag(
        None,
        "How strongly the typical acceptance rule lowers its limit when the model is unsure.",
        unsupported=_EXACT_ONLY,
    )
    disable_logprobs_during_spec_decoding: bool | None = flag(
        None,
        "Leaves log-probabilities out while tokens are guessed ahead. They are computed without this flag, though "
        "vLLM 0.6.3 then leaves them out, too.",
        unsupported="log-probabilities cost next to nothing here; leave the flag out",
        allowed=(False,),
    )


@dataclasses.dataclass
class MultimodalArgs:
    """Images and other media in prompts."""

    SECTION: ClassVar[str] = "Multimodal input and structured output"
    UNSUPPORTED: ClassVar[str] = "the server takes text only in this version"

    limit_mm_per_prompt: dict[str, Any] | None = flag(
        None,
        "How many images or other media one prompt may hold.",
        kind="kvs",
    )
    mm_processor_kwargs: dict[str, Any] | None = flag(
        None, "Settings of the model's image processor, as a JSON object."
    )
    allowed_local_media_path: str | None = flag(
        None, "A directory from which requests may load images of this machine."
    )
    allowed_media_domains: list[str] | None = flag(
        None,
        "The web domains from which requests may load images.",
        kind="str",
        many=True,
    )


@dataclasses.dataclass
class InputOutputArgs:
    """Grammars for answers, and how text is tokenised."""

    SECTION: ClassVar[str] = "Multimodal input and structured output"

    guided_decoding_backend: str = flag(
        "outlines",
        "The library that keeps answers to a JSON schema, a regular expression or a grammar: xgrammar, guidance, or "
        "auto for whichever of the two can; the other names mean auto. Options may follow after a colon: "
        "no-fallback, disable-any-whitespace, no-additional-properties.",
        example="--guided-decoding-backend guidance:disable-any-whitespace",
    )
    structured_outputs_config: dict[str, Any] | None = flag(
        None,
        "Settings for answers that must keep to a schema or grammar, as a JSON object with the keys backend, "
        "disable_fallback, disable_any_whitespace, disable_additional_properties and reasoning_parser.",
        example='--structured-outputs-config \'{"backend": "xgrammar"}\'',
    )
    reasoning_parser: str | None = flag(
        None,
        "The format in which the model writes its reasoning, which is then separated from its answer in chat: "
        "deepseek_r1 or qwen3.",
        example="--reasoning-parser qwen3",
    )
    tokenizer_pool_size: int = flag(0, "The number of processes that tokenise text.", no_effect=_POOL)
    tokenizer_pool_type: str = flag("ray", "What kind of processes tokenise text.", no_effect=_POOL)
    tokenizer_pool_extra_config: str | None = flag(
        None, "More options for the processes that tokenise text, as JSON.", no_effect=_POOL
    )
