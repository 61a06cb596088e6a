"""Flags of speculative decoding: those of vLLM 0.6.3, one for each setting, and --speculative-config of later ones.

Both become one `SpeculativeConfig`. Errors have vLLM's texts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ascend_vllm.args import hf_checks
from ascend_vllm.args.draft_model import draft_config
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.speculation import AcceptanceMethod, SpeculativeConfig, SpeculativeMethod
from ascend_vllm.errors import ConfigError, UnsupportedFlagError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import DeviceFacts

logger = init_logger(__name__)

_NGRAM = ("ngram", "[ngram]")
# names of the method; on the GPU drafts are the same
_NGRAM_NAMES = (*_NGRAM, "ngram_gpu")
# without lengths in --speculative-config
_LOOKUP_LENGTH = 5
_REFUSED = "there are n-grams, draft models and EAGLE heads: the answers are the same"
# methods of vLLM that are refused by name; those that end in _MTP, too
_REFUSED_METHODS = frozenset(
    {"medusa", "mlp_speculator", "suffix", "custom_class", "dflash", "dspark", "extract_hidden_states"}
)
_MTP = "mtp"
# as vLLM 0.6.3
_POSTERIOR_THRESHOLD, _POSTERIOR_ALPHA = 0.09, 0.3

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    """--speculative-config of vLLM 0.32, and `disable_by_batch_size` of versions before."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: _Positive | None = None
    draft_tensor_parallel_size: _Positive | None = None
    quantization: str | None = None
    max_model_len: _Positive | None = None
    prompt_lookup_max: _Positive | None = None
    prompt_lookup_min: _Positive | None = None
    disable_by_batch_size: int | None = None
    # of these only the value that changes nothing is possible
    parallel_drafting: Literal[False] = False
    use_heterogeneous_vocab: Literal[False] = False
    num_speculative_tokens_per_batch_size: None = None
    rejection_sample_method: Literal["standard"] = "standard"
    synthetic_acceptance_rates: None = None
    synthetic_acceptance_length: None = None
    revision: str | None = None
    # these concern the speed of GPUs or the drafts alone, see `_WITHOUT_EFFECT`
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    code_revision: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None
    enforce_eager: bool | None = None
    disable_padded_drafter_batch: bool = False
    use_local_argmax_reduction: bool = False
    disable_eagle_block_drop: bool = False
    # of the method "suffix", which is refused
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1


_WITHOUT_EFFECT = (
    "draft_sample_method",
    "code_revision",
    "kv_cache_dtype",
    "attention_backend",
    "moe_backend",
    "enforce_eager",
    "disable_padded_drafter_batch",
    "use_local_argmax_reduction",
    "disable_eagle_block_drop",
)


def check_flags(args: EngineFlags) -> None:
    """Checks the flags as far as that is possible without files.

    Raises:
        ConfigError: a value is out of range, requires another that is missing, or excludes another.
        UnsupportedFlagError: a method of vLLM that there is not here.
    """
    if args.speculative_config is not None:
        if args.speculative_model is not None:
            raise ConfigError(
                "--speculative-model and --speculative-config exclude one another: leave one of them out."
            )
        _settings(args.speculative_config, args.tensor_parallel_size)
    _check_old_flags(args)
    if args.speculative_config or args.speculative_model:
        _check_posterior(args)
    if (args.speculative_config or args.speculative_model) and args.pipeline_parallel_size > 1:
        raise UnsupportedFlagError(
            f"--pipeline-parallel-size {args.pipeline_parallel_size} with speculative decoding",
            "stages would wait for one another; use --tensor-parallel-size, or leave speculative decoding out",
        )


def speculative_config(args: EngineFlags, target: ModelConfig, facts: DeviceFacts) -> SpeculativeConfig | None:
    """The configuration's section, of flags that `check_flags` has accepted; None: nothing is drafted.

    Args:
        args: the flags.
        target: the model that is served.
        facts: of the device.

    Raises:
        ConfigError: the draft model does not fit the model.
        UnsupportedFlagError: a method, or a quantization of the draft model, of vLLM that there is not here.
        ModelLoadError: the draft model's config.json is missing or broken.
    """
    if args.speculative_config is None and args.speculative_model is None:
        return None
    if target.pooler is not None:
        raise ConfigError("Speculative decoding is for generation; a pooling model generates nothing.")
    settings = _of_old_flags(args) if args.speculative_config is None else _checked_settings(args)
    method = SpeculativeMethod(settings.method or "")
    draft: ModelConfig | None = None
    if method is not SpeculativeMethod.NGRAM:
        if settings.model is None:
            raise ConfigError(f"speculative_config: the method {method} needs the path of a draft model, 'model'.")
        draft = draft_config(
            args,
            method,
            settings.model,
            target,
            facts,
            quantization=settings.quantization,
            revision=settings.revision,
        )
    threshold, alpha = _posterior(args)
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=_num_tokens(settings),
        draft=draft,
        prompt_lookup_min=settings.prompt_lookup_min or 1,
        prompt_lookup_max=settings.prompt_lookup_max or 1,
        pads_drafts=args.speculative_config is None,
        max_model_len=_max_model_len(settings.max_model_len, target, draft),
        acceptance=AcceptanceMethod(args.spec_decoding_acceptance_method),
        posterior_threshold=threshold,
        posterior_alpha=alpha,
        disables_logprobs=bool(args.disable_logprobs_during_spec_decoding),
        disable_by_batch_size=settings.disable_by_batch_size,
    )


def _checked_settings(args: EngineFlags) -> _Settings:
    """--speculative-config; logs which of its keys have no effect."""
    assert args.speculative_config is not None
    settings = _settings(args.speculative_config, args.tensor_parallel_size)
    for key in _WITHOUT_EFFECT:
        if key in args.speculative_config:
            logger.info("--speculative-config: %s has no effect; it would not change an answer.", key)
    return settings


def _of_old_flags(args: EngineFlags) -> _Settings:
    return _Settings(
        method=_known(_method_of(args.speculative_model) or "", "--speculative-model"),
        model=args.speculative_model,
        num_speculative_tokens=args.num_speculative_tokens,
        quantization=args.speculative_model_quantization,
        max_model_len=args.speculative_max_model_len,
        prompt_lookup_max=args.ngram_prompt_lookup_max,
        prompt_lookup_min=args.ngram_prompt_lookup_min,
        disable_by_batch_size=args.speculative_disable_by_batch_size,
    )


def _num_tokens(settings: _Settings) -> int:
    """As asked for, within what the draft model has been trained for."""
    asked = settings.num_speculative_tokens
    most = hf_checks.num_predicted(settings.model or "")
    if asked is None:
        assert most is not None
        return most
    if most is not None and asked > most:
        raise ConfigError(
            f"This speculative model supports a maximum of num_speculative_tokens={most}, but "
            f"num_speculative_tokens={asked} was provided."
        )
    return asked


def _max_model_len(asked: int | None, target: ModelConfig, draft: ModelConfig | None) -> int:
    """The longest sequence with drafts: as asked for, else the shorter of the two models' longest."""
    lengths = {"draft": draft.max_model_len} if draft is not None else {}
    lengths["target"] = target.max_model_len
    if asked is None:
        return min(lengths.values())
    for model, length in lengths.items():
        if asked > length:
            raise ConfigError(
                f"speculative_max_model_len={asked} cannot be larger than {model}_max_model_len={length}"
            )
    return asked


def _settings(values: dict[str, Any], tensor_parallel_size: int) -> _Settings:
    """Reads and checks --speculative-config; `method` is set afterwards."""
    if "tensor_parallel_size" in values:
        raise ConfigError(
            "'tensor_parallel_size' is not a valid argument in the speculative_config. Please pass "
            "'draft_tensor_parallel_size' instead."
        )
    try:
        settings = msgspec.convert(values, _Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--speculative-config: {error}") from None
    method = settings.method or _method_of(settings.model)
    if method is None:
        raise ConfigError("num_speculative_tokens was provided but without speculative model.")
    if method in _NGRAM_NAMES:
        method = SpeculativeMethod.NGRAM
    settings.method = _known(method, "--speculative-config")
    if method == SpeculativeMethod.NGRAM:
        shortest = settings.prompt_lookup_min or settings.prompt_lookup_max or _LOOKUP_LENGTH
        longest = settings.prompt_lookup_max or shortest
        if shortest > longest:
            raise ConfigError(f"prompt_lookup_min={shortest} must be <= prompt_lookup_max={longest}")
        settings.prompt_lookup_min, settings.prompt_lookup_max = shortest, longest
    if settings.num_speculative_tokens is None and (
        settings.model is None or method == SpeculativeMethod.NGRAM or not hf_checks.predicts(settings.model)
    ):
        raise ConfigError(
            "A speculative model was provided, but `num_speculative_tokens` was not provided: "
            "num_speculative_tokens must be provided with speculative model unless the draft model config contains "
            "an n_predict parameter."
        )
    _check_batch_size(settings.disable_by_batch_size)
    size = settings.draft_tensor_parallel_size
    if size not in (None, 1, tensor_parallel_size):
        raise ConfigError(
            f"speculative_draft_tensor_parallel_size={size} cannot be other value than 1 or target model "
            "tensor_parallel_size"
        )
    return settings


def _method_of(model: str | None) -> str | None:
    """The method that the name of a draft model, or the type in its config.json, stands for; None: there is none."""
    if model is None:
        return None
    if model in _NGRAM:
        return SpeculativeMethod.NGRAM
    name = model.lower()
    model_type, version = hf_checks.model_type_of(model), hf_checks.eagle_version(model)
    if version == 3 or (version is None and "eagle3" in name):
        return SpeculativeMethod.EAGLE3
    if version == 1 or "eagle-" in name:
        return SpeculativeMethod.EAGLE
    if model_type in _REFUSED_METHODS or model_type.endswith(_MTP):
        return model_type
    return SpeculativeMethod.DRAFT_MODEL


def _known(method: str, flag: str) -> SpeculativeMethod:
    """The method of a name."""
    if method in _REFUSED_METHODS or method.endswith(_MTP):
        raise UnsupportedFlagError(f"{flag} with the method {method}", _REFUSED)
    try:
        return SpeculativeMethod(method)
    except ValueError:
        raise ConfigError(f"Unsupported speculative method: '{method}'") from None


def _check_old_flags(args: EngineFlags) -> None:
    num_tokens = args.num_speculative_tokens
    if args.speculative_model is None:
        if num_tokens is not None:
            raise ConfigError("num_speculative_tokens was provided without speculative_model.")
        return
    _check_batch_size(args.speculative_disable_by_batch_size)
    if not args.use_v2_block_manager:
        raise ConfigError(
            "Speculative decoding requires usage of the V2 block manager. Enable it with --use-v2-block-manager."
        )
    if args.speculative_model in _NGRAM:
        _check_ngram(args)
    if num_tokens is None and (args.speculative_model in _NGRAM or not hf_checks.predicts(args.speculative_model)):
        raise ConfigError(
            "num_speculative_tokens must be provided with speculative_model unless the draft model config contains "
            "an n_predict parameter."
        )
    if num_tokens is not None and num_tokens <= 0:
        raise ConfigError(f"Expected num_speculative_tokens to be greater than zero ({num_tokens}).")
    draft_size = args.speculative_draft_tensor_parallel_size
    if draft_size not in (None, 1):
        raise ConfigError(f"speculative_draft_tensor_parallel_size={draft_size} cannot be other value than 1")
    longest = args.speculative_max_model_len
    if longest is not None and longest < 1:
        raise ConfigError(f"--speculative-max-model-len must be at least 1, got {longest}.")
    _known(_method_of(args.speculative_model) or "", "--speculative-model")


def _check_batch_size(threshold: int | None) -> None:
    if threshold is not None and threshold < 2:
        raise ConfigError(
            "Expect the batch size threshold of disabling speculative decoding is > 1, but got "
            f"speculative_disable_by_batch_size={threshold}"
        )


def _check_posterior(args: EngineFlags) -> None:
    threshold, alpha = _posterior(args)
    if threshold < 0 or alpha < 0:
        raise ConfigError(
            "Expected typical_acceptance_sampler_posterior_threshold and typical_acceptance_sampler_posterior_alpha "
            f"to be > 0. Instead found typical_acceptance_sampler_posterior_threshold = {threshold} and "
            f"typical_acceptance_sampler_posterior_alpha = {alpha}"
        )


def _posterior(args: EngineFlags) -> tuple[float, float]:
    threshold = args.typical_acceptance_sampler_posterior_threshold
    alpha = args.typical_acceptance_sampler_posterior_alpha
    return _POSTERIOR_THRESHOLD if threshold is None else threshold, _POSTERIOR_ALPHA if alpha is None else alpha


def _check_ngram(args: EngineFlags) -> None:
    longest = args.ngram_prompt_lookup_max or 0
    shortest = 1 if args.ngram_prompt_lookup_min is None else args.ngram_prompt_lookup_min
    if longest < 1:
        raise ConfigError(f"ngram_prompt_lookup_max={args.ngram_prompt_lookup_max} must be > 0")
    if shortest < 1:
        raise ConfigError(f"ngram_prompt_lookup_min={shortest} must be > 0")
    if shortest > longest:
        raise ConfigError(
            f"ngram_prompt_lookup_min={shortest} cannot be larger than ngram_prompt_lookup_max={longest}"
        )
