"""Defaults that depend on other values: dtype, longest sequence, tokens per step."""

from __future__ import annotations

from ascend_vllm import envs
from ascend_vllm.config.arch import ArchConfig, StatedLength
from ascend_vllm.config.hf_defaults import WITHOUT_FLOAT16
from ascend_vllm.config.model import DTYPE_BYTES
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import DeviceFacts

logger = init_logger(__name__)

_DTYPE_NAMES = {"half": "float16", "float": "float32"}

_FALLBACK_LENGTH = 2048

# above this length, prefill is chunked by default, to limit the memory of activations
LONG_CONTEXT = 32768
_CHUNK_BUDGET = 512
_DECODE_PAUSE_S = 0.25
_MIN_BUDGET = 2048
# share of the longest sequence above which a prompt counts as long, if several may be chunked at a time
_LONG_PREFILL_SHARE = 0.04
# most logits of a step for log-probabilities of prompts: 32 MiB
_SCORED_LOGITS = 1 << 23
_MIN_SCORED_TOKENS = 16


def resolve_dtype(requested: str, stored: str | None, facts: DeviceFacts, model_type: str | None = None) -> str:
    """The dtype of weights and activations.

    With "auto", a checkpoint in float16 or bfloat16 keeps its dtype, and one in float32 (or of unknown dtype)
    gets the device's preferred 16-bit type.

    Args:
        requested: value of --dtype.
        stored: dtype of the checkpoint in config.json; None: not known yet, and not used.
        facts: of the device.
        model_type: of config.json.

    Returns:
        "float32", "float16" or "bfloat16".

    Raises:
        ConfigError: unknown, or not supported by the device or the model.
    """
    if requested == "auto":
        if stored not in DTYPE_BYTES:
            raise ConfigError(f"config.json: dtype {stored!r} is not supported; choose one with --dtype.")
        dtype = facts.dtypes[0] if stored == "float32" else stored
        if dtype == "float16" and model_type in WITHOUT_FLOAT16:
            dtype = next((other for other in facts.dtypes if other != "float16"), dtype)
        if stored == "float32":
            logger.info("The checkpoint is float32; running it in %s. --dtype float32 keeps full precision.", dtype)
    else:
        # LLM(dtype=torch.float32) means "float32"
        name = str(requested).removeprefix("torch.")
        dtype = _DTYPE_NAMES.get(name, name)
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"Unknown dtype: {requested}")
    if dtype == "float16" and model_type in WITHOUT_FLOAT16:
        raise ConfigError(
            f"The model type {model_type!r} does not support float16. Reason: Numerical instability. "
            "Please use bfloat16 or float32 instead."
        )
    if dtype not in facts.dtypes:
        raise ConfigError(f"--dtype {dtype} does not run on {facts.label}; possible are {', '.join(facts.dtypes)}.")
    return dtype


def resolve_max_model_len(requested: int | None, arch: ArchConfig, *, disable_sliding_window: bool = False) -> int:
    """The longest sequence in tokens.

    Args:
        requested: value of --max-model-len; None: the model's limit.
        arch: the model's, with its sliding window.
        disable_sliding_window: limit the length to the window, as longer sequences would change the model.

    Raises:
        ConfigError: it exceeds the model's limit, and VLLM_ALLOW_LONG_MAX_MODEL_LEN is not set.
    """
    stated = arch.max_length
    if stated is None:
        if requested is not None:
            return requested
        logger.warning("config.json states no longest sequence; assuming %d tokens.", _FALLBACK_LENGTH)
        stated = StatedLength("max_position_embeddings", _FALLBACK_LENGTH)
    name, derived, window = stated.name, stated.num_tokens, arch.sliding_window
    if disable_sliding_window and window is not None and window < derived:
        name, derived = "sliding_window", window
    if requested is None:
        return derived if stated.default is None else min(derived, stated.default)
    # a separate, larger statement permits what exceeds the others
    permitted = stated.model_max_length if name != "sliding_window" else None
    if requested > derived and not (isinstance(permitted, int) and requested <= permitted):
        text = (
            f"User-specified max_model_len ({requested}) is greater than the derived max_model_len "
            f"({name}={derived} or model_max_length={stated.model_max_length} in model's config.json). "
            "This may lead to incorrect model outputs or CUDA errors."
        )
        if not envs.allow_long_max_model_len():
            raise ConfigError(
                f"{text} To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
            )
        logger.warning("%s Make sure the value is correct and within the model context size.", text)
    return requested


def resolve_chunked_prefill(requested: bool | None, max_model_len: int, arch: ArchConfig) -> bool:
    """Whether prefill is chunked: as requested, else only for very long contexts without a sliding window."""
    if requested is not None:
        return requested
    chunked = max_model_len > LONG_CONTEXT and arch.sliding_window is None
    if chunked:
        logger.warning(
            "Chunked prefill is on, since max_model_len %d is above %d; --enable-chunked-prefill=false turns it off.",
            max_model_len,
            LONG_CONTEXT,
        )
    return chunked


def resolve_max_num_batched_tokens(
    requested: int | None,
    *,
    chunked_prefill: bool,
    max_model_len: int,
    max_num_seqs: int,
    multi_step: bool = False,
    multiple_of: int = 1,
) -> int:
    """Most tokens of a step: as requested, else enough for the longest prompt and for every sequence.

    With chunked prefill the default is small, to keep the pauses of decoding rows short; with multi-step
    scheduling, where they wait anyway, chunks are as large as whole prompts.
    """
    if requested is not None:
        return requested
    budget = _CHUNK_BUDGET if chunked_prefill and not multi_step else max(max_model_len, _MIN_BUDGET)
    return -(-max(budget, max_num_seqs) // multiple_of) * multiple_of


def resolve_max_decode_pause_s(
    requested_ms: float | None, *, chunked_prefill: bool, mixed_steps: bool, has_default: bool
) -> float | None:
    """The seconds for which prompts in the same step may delay decoding rows; None: no limit.

    Args:
        requested_ms: milliseconds, 0: no limit; None: the flag is not given.
        chunked_prefill: whether prefill is chunked.
        mixed_steps: whether whole prompts may be computed beside decoding rows.
        has_default: limit the pause by chunks without the flag, too, as their size is not given by the user.

    Raises:
        ConfigError: a limit is requested and prefill is not chunked.
    """
    if requested_ms is None:
        return _DECODE_PAUSE_S if mixed_steps or (chunked_prefill and has_default) else None
    if not chunked_prefill:
        raise ConfigError(
            "--max-decode-pause-ms needs --enable-chunked-prefill: prompts that stay whole have no chunks."
        )
    return float(requested_ms) / 1000 or None


def max_scored_tokens(vocab_size: int) -> int:
    """Most prompt tokens per step whose log-probabilities are computed, which takes vocab_size logits each.

    The limit keeps such steps as short as decoding steps.
    """
    return max(_MIN_SCORED_TOKENS, _SCORED_LOGITS // vocab_size)


def resolve_long_prefill_threshold(requested: int, max_num_partial_prefills: int, max_model_len: int) -> int:
    """Tokens above which a prompt is long: as requested, else a share of max_model_len if several are chunked."""
    if requested or max_num_partial_prefills <= 1:
        return requested
    return int(max_model_len * _LONG_PREFILL_SHARE)
