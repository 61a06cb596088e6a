"""Values that follow from others: dtype, longest sequence, tokens per step."""

from __future__ import annotations

from ascend_vllm import envs
from ascend_vllm.config.arch import ArchConfig, StatedLength
from ascend_vllm.config.model import DTYPE_BYTES
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import DeviceFacts

logger = init_logger(__name__)

_DTYPE_NAMES = {"half": "float16", "float": "float32"}

_FALLBACK_LENGTH = 2048

# above this a whole prompt needs so much memory for activations that prefill is chunked by default
LONG_CONTEXT = 32768
_CHUNK_BUDGET = 512
_DECODE_PAUSE_S = 0.25
_MIN_BUDGET = 2048
# of the longest sequence: where a prompt begins to be long if several may be cut at a time
_LONG_PREFILL_SHARE = 0.04
# logits that a step computes for the log-probabilities of prompts: 32 MiB of them
_SCORED_LOGITS = 1 << 23
_MIN_SCORED_TOKENS = 16


def check_device(dtype: str, facts: DeviceFacts) -> None:
    """Refuses devices that no model runs on, before a model is fetched or read.

    Args:
        dtype: the --dtype value; if it is wrong, that is reported instead.
        facts: of the device.

    Raises:
        ConfigError: no model runs on it, or none in this dtype.
    """
    if facts.refusal is None:
        return
    if dtype != "auto":
        resolve_dtype(dtype, None, facts)
    raise ConfigError(facts.refusal)


def resolve_dtype(requested: str, stored: str | None, facts: DeviceFacts) -> str:
    """The dtype of weights and activations.

    Under "auto" a checkpoint in float16 or bfloat16 keeps its dtype, and one in float32 (or of unknown dtype)
    gets the device's preferred half type.

    Args:
        requested: of --dtype.
        stored: of the checkpoint, by config.json; None: not known yet, and not asked for.
        facts: of the device.

    Returns:
        "float32", "float16" or "bfloat16".

    Raises:
        ConfigError: unknown, or not a dtype of the device.
    """
    if requested == "auto":
        if stored not in DTYPE_BYTES:
            raise ConfigError(f"config.json: dtype {stored!r} is not supported; choose one with --dtype.")
        dtype = facts.dtypes[0] if stored == "float32" else stored
        if stored == "float32":
            logger.info("The checkpoint is float32; running it in %s. --dtype float32 keeps full precision.", dtype)
    else:
        # LLM(dtype=torch.float32) is as good as its name
        name = str(requested).removeprefix("torch.")
        dtype = _DTYPE_NAMES.get(name, name)
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"Unknown dtype: {requested}")
    if dtype not in facts.dtypes:
        raise ConfigError(f"--dtype {dtype} does not run on {facts.label}; possible are {', '.join(facts.dtypes)}.")
    return dtype


def resolve_max_model_len(requested: int | None, arch: ArchConfig, *, disable_sliding_window: bool = False) -> int:
    """The longest sequence in tokens.

    Args:
        requested: of --max-model-len; None: what the model allows.
        arch: the model's, with its window.
        disable_sliding_window: the window is off, so that longer sequences would change the model.

    Raises:
        ConfigError: more is requested than the model allows, and VLLM_ALLOW_LONG_MAX_MODEL_LEN is not set.
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
        return derived
    if requested > derived:
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
    """Whether prompts are cut: as requested, else only for very long contexts without a sliding window."""
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
    """The tokens of a step: as requested, else enough for the longest prompt and for every sequence.

    Chunks are small, so that running answers keep flowing; several steps at once make the answers wait anyway, and
    there chunks are as large as whole prompts.
    """
    if requested is not None:
        return requested
    budget = _CHUNK_BUDGET if chunked_prefill and not multi_step else max(max_model_len, _MIN_BUDGET)
    return -(-max(budget, max_num_seqs) // multiple_of) * multiple_of


def resolve_max_decode_pause_s(
    requested_ms: float | None, *, chunked_prefill: bool, has_default: bool
) -> float | None:
    """The seconds that running answers may pause for chunks of prompts; None: any time.

    Args:
        requested_ms: milliseconds, 0 for any time; None: as without the flag.
        chunked_prefill: prompts are cut.
        has_default: without the flag the pause is limited: nobody has chosen the size of chunks.

    Raises:
        ConfigError: a pause is asked for and prompts are not cut.
    """
    if requested_ms is None:
        return _DECODE_PAUSE_S if chunked_prefill and has_default else None
    if not chunked_prefill:
        raise ConfigError(
            "--max-decode-pause-ms needs --enable-chunked-prefill: prompts that stay whole have no pieces."
        )
    return float(requested_ms) / 1000 or None


def max_scored_tokens(vocab_size: int) -> int:
    """The prompt tokens whose log-probabilities a step computes, each of which takes the logits of all tokens.

    With few enough a step stays as short as those in which other requests decode.
    """
    return max(_MIN_SCORED_TOKENS, _SCORED_LOGITS // vocab_size)


def resolve_long_prefill_threshold(requested: int, max_num_partial_prefills: int, max_model_len: int) -> int:
    """The tokens beyond which a prompt is long: as requested, else a share of the longest if several may be cut."""
    if requested or max_num_partial_prefills <= 1:
        return requested
    return int(max_model_len * _LONG_PREFILL_SHARE)
