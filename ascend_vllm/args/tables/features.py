"""Flags of features on top of plain generation: adapters, speculation, images, output grammars."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ascend_vllm.args.fields import flag
from ascend_vllm.args.tables.model import QUANTIZATIONS

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
        256, "The largest number of tokens that a LoRA adapter may add to the vocabulary."
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
    fully_sharded_loras: bool = flag(False, "Shares all of the LoRA computation among the devices, not half of it.")


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
    """Drafting several tokens cheaply, which the model verifies in one step."""

    SECTION: ClassVar[str] = "Speculative decoding"

    speculative_config: dict[str, Any] | None = flag(
        None,
        "All settings of speculative decoding in one JSON object, with vLLM's keys: method (ngram, draft_model, "
        "eagle or eagle3), model, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min and others.",
        example='--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    )
    speculative_model: str | None = flag(
        None,
        "The draft model, a smaller model with the same tokenizer or an EAGLE head, which proposes tokens that the "
        "served model verifies several at a time. [ngram] proposes what followed the last words earlier in the text.",
        example="--speculative-model [ngram] --num-speculative-tokens 4 --ngram-prompt-lookup-max 4",
    )
    speculative_model_quantization: str | None = flag(
        None,
        "How the weights of the draft model are quantised; without it, the draft model's own files say so.",
        choices=QUANTIZATIONS,
        example="--speculative-model /models/small --num-speculative-tokens 4 --speculative-model-quantization awq",
    )
    num_speculative_tokens: int | None = flag(
        None,
        "The largest number of tokens that are drafted for each sequence in a step.",
        example="--speculative-model /models/small --num-speculative-tokens 4",
    )
    speculative_disable_mqa_scorer: bool = flag(
        False,
        "Verifies drafted tokens as separate sequences instead of all in one.",
        no_effect="drafted tokens are always verified in one pass over their sequence",
    )
    speculative_draft_tensor_parallel_size: int | None = flag(
        None,
        "The number of devices that share the draft model. It may be 1 only: the draft model is computed whole on "
        "one device, however many share the served model.",
        short=("-spec-draft-tp",),
        example="--tensor-parallel-size 2 --speculative-model /models/small --num-speculative-tokens 4 "
        "--speculative-draft-tensor-parallel-size 1",
    )
    speculative_max_model_len: int | None = flag(
        None,
        "The longest sequence in tokens for which tokens are drafted; longer ones go on without drafts.",
        example="--speculative-max-model-len 2048",
    )
    speculative_disable_by_batch_size: int | None = flag(
        None,
        "Requests that arrive while so many or more are running get no drafts. Without it, measurements decide when "
        "drafts pay.",
        example="--speculative-disable-by-batch-size 8",
    )
    ngram_prompt_lookup_max: int | None = flag(
        None,
        "The largest number of last tokens that are looked up in the text so far, to draft what followed them.",
        example="--speculative-model [ngram] --num-speculative-tokens 4 --ngram-prompt-lookup-max 4",
    )
    ngram_prompt_lookup_min: int | None = flag(
        None,
        "The smallest number of last tokens that are looked up in the text so far, to draft what followed them.",
        example="--ngram-prompt-lookup-max 4 --ngram-prompt-lookup-min 2",
    )
    spec_decoding_acceptance_method: str = flag(
        "rejection_sampler",
        "The rule by which drafted tokens are accepted. With rejection_sampler the answers are those without drafts, "
        "token for token; typical_acceptance_sampler accepts more drafts of requests that sample, and changes their "
        "answers.",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
        example="--spec-decoding-acceptance-method typical_acceptance_sampler",
    )
    typical_acceptance_sampler_posterior_threshold: float | None = flag(
        None,
        "With typical_acceptance_sampler, a drafted token whose probability is above this is accepted in any case; "
        "the default is 0.09.",
        example="--typical-acceptance-sampler-posterior-threshold 0.2",
    )
    typical_acceptance_sampler_posterior_alpha: float | None = flag(
        None,
        "With typical_acceptance_sampler, a drafted token whose probability is above this times exp(-entropy) is "
        "accepted; the default is 0.3.",
        example="--typical-acceptance-sampler-posterior-alpha 0.45",
    )
    disable_logprobs_during_spec_decoding: bool | None = flag(
        None,
        "Reports log-probabilities of 0 for requests whose tokens are drafted. Without this flag they are computed, "
        "though vLLM 0.6.3 leaves them out by default.",
        example="--disable-logprobs-during-spec-decoding",
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
