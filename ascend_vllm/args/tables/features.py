"""Flags of features on top of plain generation: adapters, speculation, images, output grammars."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ascend_vllm.args.fields import flag
from ascend_vllm.args.tables.model import QUANTIZATIONS

_NO_LORA = "LoRA adapters are not available in this version; merge the adapter into the model's weights"
_NO_PROMPT_ADAPTER = "prompt adapters are not available in this version"
_NO_SPECULATION = "speculative decoding is not available in this version; leave it out, the answers are the same"
_NO_MULTIMODAL = "the server takes text only in this version"
_POOL = "texts are tokenised in threads beside the event loop, without a pool of processes"


@dataclasses.dataclass
class AdapterArgs:
    """LoRA and prompt adapters."""

    SECTION: ClassVar[str] = "Adapters"

    enable_lora: bool = flag(
        False,
        "Lets requests choose LoRA adapters, small sets of weights that change what the model has learned.",
        kind="flag",
        unsupported=_NO_LORA,
    )
    max_loras: int = flag(
        1, "The largest number of different LoRA adapters in one batch.", kind="int", unsupported=_NO_LORA
    )
    max_lora_rank: int = flag(16, "The largest rank that a LoRA adapter may have.", kind="int", unsupported=_NO_LORA)
    lora_extra_vocab_size: int = flag(
        256,
        "The largest number of tokens that a LoRA adapter may add to the vocabulary.",
        kind="int",
        unsupported=_NO_LORA,
    )
    lora_dtype: str = flag(
        "auto",
        "The number format of LoRA adapters; auto is the format of the model.",
        kind="str",
        choices=("auto", "float16", "bfloat16", "float32"),
        unsupported=_NO_LORA,
    )
    long_lora_scaling_factors: str | None = flag(
        None,
        "Position scales for which long-context LoRA adapters were trained, separated by commas.",
        kind="nullable_str",
        unsupported=_NO_LORA,
    )
    max_cpu_loras: int | None = flag(
        None,
        "The largest number of LoRA adapters that are kept in CPU memory.",
        kind="int",
        unsupported=_NO_LORA,
    )
    fully_sharded_loras: bool = flag(
        False,
        "Shares all of the LoRA computation among the devices, not half of it.",
        kind="flag",
        unsupported=_NO_LORA,
    )
    enable_prompt_adapter: bool = flag(
        False,
        "Lets requests choose prompt adapters, learned tokens that are put before the prompt.",
        kind="flag",
        unsupported=_NO_PROMPT_ADAPTER,
    )
    max_prompt_adapters: int = flag(
        1,
        "The largest number of different prompt adapters in one batch.",
        kind="int",
        unsupported=_NO_PROMPT_ADAPTER,
    )
    max_prompt_adapter_token: int = flag(
        0,
        "The largest number of tokens that a prompt adapter may have.",
        kind="int",
        unsupported=_NO_PROMPT_ADAPTER,
    )


@dataclasses.dataclass
class SpeculativeArgs:
    """Guessing tokens ahead with something faster than the model."""

    SECTION: ClassVar[str] = "Speculative decoding"

    speculative_config: dict[str, Any] | None = flag(
        None,
        "All settings of speculative decoding in one JSON object.",
        kind="json_object",
        unsupported=_NO_SPECULATION,
    )
    speculative_model: str | None = flag(
        None,
        "A smaller model that guesses tokens ahead, which the large model then checks several at a time.",
        kind="nullable_str",
        unsupported=_NO_SPECULATION,
    )
    speculative_model_quantization: str | None = flag(
        None,
        "How the weights of the guessing model are quantised.",
        kind="nullable_str",
        choices=QUANTIZATIONS,
        unsupported=_NO_SPECULATION,
    )
    num_speculative_tokens: int | None = flag(
        None, "The number of tokens that are guessed ahead in each step.", kind="int", unsupported=_NO_SPECULATION
    )
    speculative_disable_mqa_scorer: bool = flag(
        False,
        "Checks guessed tokens as separate sequences instead of all in one.",
        kind="flag",
        unsupported=_NO_SPECULATION,
    )
    speculative_draft_tensor_parallel_size: int | None = flag(
        None,
        "The number of devices that share the guessing model.",
        kind="int",
        short=("-spec-draft-tp",),
        unsupported=_NO_SPECULATION,
    )
    speculative_max_model_len: int | None = flag(
        None,
        "The longest sequence for which tokens are guessed; longer ones go on without guesses.",
        kind="int",
        unsupported=_NO_SPECULATION,
    )
    speculative_disable_by_batch_size: int | None = flag(
        None,
        "Stops guessing while more requests than this are waiting.",
        kind="int",
        unsupported=_NO_SPECULATION,
    )
    ngram_prompt_lookup_max: int | None = flag(
        None,
        "The longest piece of text that is looked up in the prompt to guess what follows it.",
        kind="int",
        unsupported=_NO_SPECULATION,
    )
    ngram_prompt_lookup_min: int | None = flag(
        None,
        "The shortest piece of text that is looked up in the prompt to guess what follows it.",
        kind="int",
        unsupported=_NO_SPECULATION,
    )
    spec_decoding_acceptance_method: str = flag(
        "rejection_sampler",
        "The rule by which guessed tokens are accepted; rejection_sampler keeps the model's own probabilities.",
        kind="str",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
        unsupported=_NO_SPECULATION,
    )
    typical_acceptance_sampler_posterior_threshold: float | None = flag(
        None,
        "The lowest probability at which the typical acceptance rule takes a guessed token.",
        kind="float",
        unsupported=_NO_SPECULATION,
    )
    typical_acceptance_sampler_posterior_alpha: float | None = flag(
        None,
        "How strongly the typical acceptance rule lowers its limit when the model is unsure.",
        kind="float",
        unsupported=_NO_SPECULATION,
    )
    disable_logprobs_during_spec_decoding: bool | None = flag(
        None,
        "Leaves log-probabilities out while tokens are guessed ahead.",
        kind="bool",
        unsupported=_NO_SPECULATION,
    )


@dataclasses.dataclass
class InputOutputArgs:
    """Images in, grammars out, and how text is tokenised."""

    SECTION: ClassVar[str] = "Multimodal input and structured output"

    limit_mm_per_prompt: dict[str, Any] | None = flag(
        None,
        "How many images or other media one prompt may hold.",
        kind="kvs",
        unsupported=_NO_MULTIMODAL,
    )
    mm_processor_kwargs: dict[str, Any] | None = flag(
        None,
        "Settings of the model's image processor, as a JSON object.",
        kind="json_object",
        unsupported=_NO_MULTIMODAL,
    )
    allowed_local_media_path: str | None = flag(
        None,
        "A directory from which requests may load images of this machine.",
        kind="nullable_str",
        unsupported=_NO_MULTIMODAL,
    )
    allowed_media_domains: list[str] | None = flag(
        None,
        "The web domains from which requests may load images.",
        kind="str",
        many=True,
        unsupported=_NO_MULTIMODAL,
    )
    guided_decoding_backend: str = flag(
        "outlines",
        "The library that keeps answers to a JSON schema, a regular expression or a grammar: xgrammar, guidance, or "
        "auto for whichever of the two can; the other names mean auto. Options may follow after a colon: "
        "no-fallback, disable-any-whitespace, no-additional-properties.",
        kind="str",
        example="--guided-decoding-backend guidance:disable-any-whitespace",
    )
    structured_outputs_config: dict[str, Any] | None = flag(
        None,
        "Settings for answers that must keep to a schema or grammar, as a JSON object with the keys backend, "
        "disable_fallback, disable_any_whitespace, disable_additional_properties and reasoning_parser.",
        kind="json_object",
        example='--structured-outputs-config \'{"backend": "xgrammar"}\'',
    )
    reasoning_parser: str | None = flag(
        None,
        "The format in which the model writes its thoughts, which are then separated from its answer in chat: "
        "deepseek_r1 or qwen3.",
        kind="nullable_str",
        example="--reasoning-parser qwen3",
    )
    tokenizer_pool_size: int = flag(0, "The number of processes that tokenise text.", kind="int", no_effect=_POOL)
    tokenizer_pool_type: str = flag("ray", "What kind of processes tokenise text.", kind="str", no_effect=_POOL)
    tokenizer_pool_extra_config: str | None = flag(
        None, "More options for the processes that tokenise text, as JSON.", kind="nullable_str", no_effect=_POOL
    )
