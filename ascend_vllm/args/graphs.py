"""Decides which graphs decoding replays, from flags, environment and model."""

from __future__ import annotations

from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.graphs import (
    GraphConfig,
    GraphMode,
    default_capture_sizes,
    default_piece_sizes,
    fit_capture_sizes,
    parse_capture_sizes,
)
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

GEAR_ENABLE = "PTA_TORCHAIR_DECODE_GEAR_ENABLE"
GEAR_LIST = "PTA_TORCHAIR_DECODE_GEAR_LIST"
DEFAULT_MAX_SEQ_LEN_TO_CAPTURE = 8192


def resolve_graph_config(config: EngineConfig, max_seq_len_to_capture: int) -> GraphConfig:
    """The configuration's section for graphs; logs the decision with its reasons.

    Args:
        config: all other sections.
        max_seq_len_to_capture: --max-seq-len-to-capture.

    Raises:
        ConfigError: a flag or variable is invalid, or graphs are required and not possible.
    """
    if max_seq_len_to_capture < 1:
        raise ConfigError(f"--max-seq-len-to-capture must be at least 1, got {max_seq_len_to_capture}.")
    asks = envs.infer_mode() == "PTA"
    is_cpu = config.device.device == "cpu"
    num_drafts = 0 if config.speculation is None else config.speculation.num_speculative_tokens
    reason = _reason_against(config, asks=asks)
    if reason:
        if asks:
            logger.warning("INFER_MODE=PTA has no effect: %s", reason)
        elif not is_cpu:
            logger.info("Decoding runs without graphs: %s", reason)
        if max_seq_len_to_capture != DEFAULT_MAX_SEQ_LEN_TO_CAPTURE:
            logger.warning("--max-seq-len-to-capture has no effect: %s", reason)
        # tapes of a CPU's kernels cannot contain communication between workers
        records = not config.model.enforce_eager and config.model.pooler is None and config.parallel.world_size == 1
        if not (is_cpu and records):
            return GraphConfig()
        return GraphConfig(GraphMode.RECORDED, query_lens=tuple(range(1, num_drafts + 2)))
    mode = GraphMode.COMPILED if asks else GraphMode.CAPTURED
    sizes = _resolve_capture_sizes(config.scheduler.max_num_seqs, asks=asks)
    max_seq_len = min(max_seq_len_to_capture, config.scheduler.max_model_len)
    logger.info(
        "Decoding replays %s graphs of %s sequences of up to %d tokens; --enforce-eager turns this off",
        mode.value,
        ", ".join(map(str, sizes)),
        max_seq_len,
    )
    # a row has all drafts or, rarely, fewer
    query_lens = (1, num_drafts + 1) if num_drafts else (1,)
    # compilers notice what a model does on the host in each step; captures do not
    can_capture = config.model.arch.captures_graphs
    piece_sizes = default_piece_sizes(config.scheduler.max_num_batched_tokens) if can_capture else ()
    return GraphConfig(mode, sizes, max_seq_len, query_lens, piece_sizes)


def _reason_against(config: EngineConfig, *, asks: bool) -> str | None:
    """Why decoding runs without graphs; None: it uses graphs.

    Raises:
        ConfigError: INFER_MODE=PTA requires graphs that are not possible.
    """
    model = config.model
    num_stages = config.parallel.pipeline_parallel_size
    if config.device.device == "cpu":
        return "no graphs are captured on CPU"
    if model.enforce_eager:
        return "--enforce-eager is set"
    if model.pooler is not None:
        return "a pooling model does not decode"
    flash = "ASCEND_VLLM_ATTENTION_OPS=flash" if envs.ascend_attention_ops() == "flash" else ""
    if asks:
        if model.arch.num_experts > 1 and config.scheduler.num_scheduler_steps > 1:
            raise ConfigError(
                "INFER_MODE=PTA does not go with --num-scheduler-steps above 1 for models with experts: set "
                "--num-scheduler-steps 1, or unset INFER_MODE."
            )
        if num_stages > 1:
            raise ConfigError(
                f"INFER_MODE=PTA with --pipeline-parallel-size {num_stages}: stages run without graphs in this "
                "version; unset INFER_MODE or use one stage."
            )
        if config.lora is not None:
            raise ConfigError(
                "INFER_MODE=PTA does not go with --enable-lora, whose operators are captured only: unset INFER_MODE."
            )
        if flash:
            raise ConfigError(
                f"INFER_MODE=PTA does not go with {flash}, whose operators cannot be replayed: unset one of them."
            )
        return None
    if not model.arch.captures_graphs:
        return f"{model.architecture} has them with INFER_MODE=PTA only"
    if num_stages > 1:
        return f"--pipeline-parallel-size {num_stages}, and stages run without them"
    return f"the attention operators of {flash} cannot be replayed" if flash else None


def _resolve_capture_sizes(max_num_seqs: int, *, asks: bool) -> tuple[int, ...]:
    text = envs.torchair_decode_gear_list()
    if not (asks and envs.torchair_decode_gear_enable()):
        if text:
            missing = f"{GEAR_ENABLE}=1" if asks else "INFER_MODE=PTA"
            logger.warning("%s=%s has no effect without %s", GEAR_LIST, text, missing)
        return default_capture_sizes(max_num_seqs)
    if not text:
        sizes = default_capture_sizes(max_num_seqs)
        logger.info("%s is not set; capture sizes: %s", GEAR_LIST, ", ".join(map(str, sizes)))
        return sizes
    sizes, changes = fit_capture_sizes(parse_capture_sizes(text, GEAR_LIST), max_num_seqs)
    adjustments = f" ({'; '.join(changes)})" if changes else ""
    logger.info("%s=%s; capture sizes: %s%s", GEAR_LIST, text, ", ".join(map(str, sizes)), adjustments)
    return sizes
