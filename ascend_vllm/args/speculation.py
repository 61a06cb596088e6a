"""Flags of speculative decoding: those of vLLM 0.6.3, one for each setting, and --speculative-config of later ones.

Both become one `SpeculativeConfig`. Errors have vLLM's texts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ascend_vllm.args import hf_checks
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.speculation import AcceptanceMethod, SpeculativeConfig, SpeculativeMethod
from ascend_vllm.errors import ConfigError, UnsupportedFlagError
from ascend_vllm.logger import init_logger

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
    # all values of these give the same answers here
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    revision: str | None = None
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
    if (args.speculative_config or args.speculative_model) and args.pipeline_parallel_size > 1:
        raise UnsupportedFlagError(
            f"--pipeline-parallel-size {args.pipeline_parallel_size} with speculative decoding",
            "stages would wait for one another; use --tensor-parallel-size, or leave speculative decoding out",
        )


def speculative_config(args: EngineFlags, target: ModelConfig) -> SpeculativeConfig | None:
    """The configuration's section, of flags that `check_flags` has accepted; None: nothing is drafted.

    Args:
        args: the flags.
        target: the model that is served.

    Raises:
        ConfigError: the draft model does not fit the model.
        UnsupportedFlagError: a method of vLLM that there is not here.
    """
    if args.speculative_config is None and args.speculative_model is None:
        return None
    if target.pooler is not None:
        raise ConfigError("Speculative decoding is for generation; a pooling model generates nothing.")
    if args.speculative_config is not None:
        settings = _settings(args.speculative_config, args.tensor_parallel_size)
        config = _of_settings(settings, target)
    else:
        config = _of_old_flags(args, target)
    if config.method is not SpeculativeMethod.NGRAM:
        raise UnsupportedFlagError(
            f"speculative decoding by {config.method}",
            "only n-grams are available in this version: --speculative-model [ngram]",
        )
    return config


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
    model_type = hf_checks.model_type_of(model)
    if "eagle3" in name:
        return SpeculativeMethod.EAGLE3
    if "eagle-" in name or model_type == "eagle":
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


def _of_settings(settings: _Settings, target: ModelConfig) -> SpeculativeConfig:
    assert settings.num_speculative_tokens is not None
    return SpeculativeConfig(
        method=SpeculativeMethod(settings.method or ""),
        num_speculative_tokens=settings.num_speculative_tokens,
        draft_quantization=settings.quantization,
        prompt_lookup_min=settings.prompt_lookup_min or 1,
        prompt_lookup_max=settings.prompt_lookup_max or 1,
        max_model_len=min(settings.max_model_len or target.max_model_len, target.max_model_len),
        disable_by_batch_size=settings.disable_by_batch_size,
    )


def _check_old_flags(args: EngineFlags) -> None:
    num_tokens = args.num_speculative_tokens
    if args.speculative_model is None:
        if num_tokens is not None:
            raise ConfigError("num_speculative_tokens was provided without speculative_model.")
        return
    _check_batch_size(args.speculative_disable_by_batch_size)
    if args.enable_chunked_prefill:
        raise ConfigError(
            "Speculative decoding and chunked prefill are currently mutually exclusive (enable_chunked_prefill=True)."
        )
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
    _check_posterior(args)
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


def _of_old_flags(args: EngineFlags, target: ModelConfig) -> SpeculativeConfig:
    model = args.speculative_model
    assert model is not None
    num_tokens, most = args.num_speculative_tokens, hf_checks.num_predicted(model)
    if num_tokens is None or (most is not None and num_tokens > most):
        if num_tokens is not None:
            raise ConfigError(
                f"This speculative model supports a maximum of num_speculative_tokens={most}, but "
                f"num_speculative_tokens={num_tokens} was provided."
            )
        assert most is not None
        num_tokens = most
    longest = args.speculative_max_model_len
    if longest is not None and longest > target.max_model_len:
        raise ConfigError(
            f"speculative_max_model_len={longest} cannot be larger than target_max_model_len={target.max_model_len}"
        )
    threshold, alpha = _posterior(args)
    return SpeculativeConfig(
        method=_known(_method_of(model) or "", "--speculative-model"),
        num_speculative_tokens=num_tokens,
        draft_quantization=args.speculative_model_quantization,
        prompt_lookup_min=args.ngram_prompt_lookup_min or 1,
        prompt_lookup_max=args.ngram_prompt_lookup_max or 1,
        pads_drafts=True,
        max_model_len=target.max_model_len if longest is None else longest,
        acceptance=AcceptanceMethod(args.spec_decoding_acceptance_method),
        posterior_threshold=threshold,
        posterior_alpha=alpha,
        disables_logprobs=bool(args.disable_logprobs_during_spec_decoding),
        disable_by_batch_size=args.speculative_disable_by_batch_size,
    )
