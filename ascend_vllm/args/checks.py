"""Checks of flags' values and their combinations; messages name the flags, with vLLM's texts if it has any."""

from __future__ import annotations

import importlib.util
from typing import Any

import psutil

from ascend_vllm import envs
from ascend_vllm.args import feature_checks, hf_checks
from ascend_vllm.args.fields import Flag, Kind, flags_of
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import DeviceFacts

logger = init_logger(__name__)

_GIB = 1 << 30

# types that the command line's parser produces, to check arguments from Python
_TYPES: dict[Kind, tuple[type, ...]] = {
    "flag": (bool,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "length": (int, str),
    "json_object": (dict,),
    "kvs": (dict,),
}

# flags with error texts of vLLM's own for values that are not among the choices
_CHOICE_MESSAGES = {
    "kv_cache_dtype": "Unknown kv cache dtype: {value}",
    "quantization": "Unknown quantization method: {value}. Must be one of {choices}.",
    "distributed_executor_backend": "Unrecognized distributed executor backend {value}. Supported values are 'ray', "
    "'mp' or custom ExecutorBase subclass.",
}


def _check_value(item: Flag, value: Any) -> None:
    if value is None or value == item.default:
        return
    types = _TYPES.get(item.kind)
    is_stray_bool = isinstance(value, bool) and types is not None and bool not in types
    if types is not None and (is_stray_bool or not isinstance(value, types)):
        raise ConfigError(f"{item.name} ({item.field}) cannot be {value!r} of type {type(value).__name__}.")
    choices = item.choices
    # LLM(dtype=torch.float32) is accepted here: dtype is checked elsewhere
    if choices is None or value in choices or item.is_plugin(value):
        return
    if item.field != "dtype":
        template = _CHOICE_MESSAGES.get(item.field, "{name} must be one of {choices}, got {value!r}.")
        raise ConfigError(template.format(name=item.name, value=value, choices=list(choices)))


def _at_least(args: EngineFlags, minimum: float, *fields: str) -> None:
    for field in fields:
        value = getattr(args, field)
        if value is not None and value < minimum:
            raise ConfigError(f"--{field.replace('_', '-')} must be at least {minimum}, got {value}.")


def _check_swap_space(swap_space: float) -> None:
    total = psutil.virtual_memory().total
    wanted = swap_space * _GIB
    text = f"{swap_space:.2f} GiB out of the {total / _GIB:.2f} GiB total CPU memory is allocated for the swap space."
    if wanted > 0.7 * total:
        raise ConfigError(f"Too large swap space. {text}")
    if wanted > 0.4 * total:
        logger.warning("Possibly too large swap space. %s", text)


# values of --collect-detailed-traces
_TRACED_PARTS = ("model", "worker", "all")


def check_flags(args: EngineFlags) -> None:
    """Checks that need no files.

    Raises:
        ConfigError: a value has the wrong type, is not among the choices, or is out of range.
    """
    for item in flags_of(type(args)):
        _check_value(item, getattr(args, item.field))
    if args.num_scheduler_steps < 1:
        raise ConfigError(f"num_scheduler_steps ({args.num_scheduler_steps}) must be greater than or equal to 1.")
    if args.num_lookahead_slots < 0:
        raise ConfigError(f"num_lookahead_slots ({args.num_lookahead_slots}) must be greater than or equal to 0.")
    feature_checks.check_features(args)
    if args.gpu_memory_utilization > 1.0:
        raise ConfigError(f"GPU memory utilization must be less than 1.0. Got {args.gpu_memory_utilization}.")
    if args.gpu_memory_utilization <= 0.0:
        raise ConfigError(f"--gpu-memory-utilization must be above 0, got {args.gpu_memory_utilization}.")
    if args.rope_theta is not None and args.rope_theta <= 0:
        raise ConfigError(f"--rope-theta must be above 0, got {args.rope_theta}.")
    if args.queue_timeout_s is not None and not args.queue_timeout_s > 0:
        raise ConfigError(f"--queue-timeout-s must be above 0, got {args.queue_timeout_s}.")
    if args.max_decode_pause_ms is not None and not 0 <= args.max_decode_pause_ms < float("inf"):
        raise ConfigError(f"--max-decode-pause-ms must be a number of at least 0, got {args.max_decode_pause_ms}.")
    _at_least(
        args, 0, "swap_space", "cpu_offload_gb", "scheduler_delay_factor", "max_logprobs", "tokenizer_pool_size"
    )
    _at_least(args, 0, "long_prefill_token_threshold")
    _at_least(args, 1, "max_num_seqs", "num_gpu_blocks_override", "max_num_queued_reqs")
    _at_least(args, 1, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "stream_interval")
    _at_least(args, 1, "data_parallel_size_local", "nnodes")
    if not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"--seed must fit in 64 bits, got {args.seed}.")
    # the default must not fail on machines with little memory
    if args.swap_space != type(args).swap_space:
        _check_swap_space(args.swap_space)
    if args.preemption_mode == "swap" and not args.swap_space:
        raise ConfigError("--preemption-mode swap needs --swap-space above 0.")
    hf_checks.check_flags(args)


def check_block_size(requested: int | None, facts: DeviceFacts) -> int:
    """Returns the block size if the device supports it.

    Raises:
        ConfigError: the device's attention kernels do not take blocks of this size.
    """
    if requested is None:
        return facts.default_block_size
    if requested not in facts.block_sizes:
        sizes = ", ".join(map(str, facts.block_sizes))
        raise ConfigError(f"--block-size must be one of {sizes} on {facts.label}, got {requested}.")
    return requested


def check_num_seqs(requested: int, facts: DeviceFacts) -> None:
    """Checks that one call of attention can have the rows of a step.

    Raises:
        ConfigError: there may be more than the device's operators take.
    """
    if facts.max_num_seqs is not None and requested > facts.max_num_seqs:
        raise ConfigError(
            f"--max-num-seqs must be at most {facts.max_num_seqs} on {facts.label}, whose attention operators take "
            f"no more sequences at once, got {requested}."
        )


def check_config(config: EngineConfig) -> None:
    """Checks that concern several sections of a finished configuration.

    Raises:
        ConfigError: a step's token budget does not fit other settings, or features exclude one another.
    """
    _check_budget(config)
    _check_partial_prefills(config.scheduler)
    if config.model.pooler is not None:
        _check_pooling(config.scheduler)
    if config.cache.enable_prefix_caching and any(plan.sliding_window for plan in config.model.arch.layers):
        raise ConfigError(
            "Prefix caching is not supported with sliding window. Run with --disable-sliding-window to use prefix "
            "caching."
        )
    window, steps = config.cache.sliding_window, config.scheduler.num_scheduler_steps
    # a finished row is computed until the call ends; its blocks must not be freed before
    if window is not None and steps >= window:
        raise ConfigError(
            f"--num-scheduler-steps ({steps}) must be smaller than the model's sliding window ({window})."
        )


def _check_pooling(scheduler: SchedulerConfig) -> None:
    """Refuses multi-step scheduling, and swapping, which would lose the partial results of a pooled prompt."""
    if scheduler.num_scheduler_steps > 1:
        raise ConfigError(
            f"--num-scheduler-steps {scheduler.num_scheduler_steps} is for generation; a pooling model takes one "
            "step for a prompt."
        )
    if scheduler.preemption_mode == "swap":
        raise ConfigError("--preemption-mode swap is for generation; a pooling model computes a prompt again.")


def _check_budget(config: EngineConfig) -> None:
    scheduler, block_size = config.scheduler, config.cache.block_size
    budget, longest = scheduler.max_num_batched_tokens, scheduler.max_model_len
    if budget < longest and not scheduler.enable_chunked_prefill:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) is smaller than max_model_len ({longest}). This effectively limits "
            "the maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please "
            "increase max_num_batched_tokens or decrease max_model_len."
        )
    if budget < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) must be greater than or equal to max_num_seqs "
            f"({scheduler.max_num_seqs})."
        )
    if scheduler.enable_chunked_prefill and config.cache.enable_prefix_caching and budget % block_size:
        raise ConfigError(
            "When enabling chunked prefill and prefix caching, max_num_batched_tokens (chunk size) must be dividable "
            f"by block size, but got chunk_size ({budget}) % block_size ({block_size}) = {budget % block_size}"
        )


def _check_partial_prefills(scheduler: SchedulerConfig) -> None:
    partial, long_partial = scheduler.max_num_partial_prefills, scheduler.max_long_partial_prefills
    if partial < 1:
        raise ConfigError(f"max_num_partial_prefills ({partial}) must be greater than or equal to 1.")
    if partial > 1:
        if not scheduler.enable_chunked_prefill:
            raise ConfigError("Chunked prefill must be enabled to set max_num_partial_prefills > 1.")
        if scheduler.long_prefill_token_threshold > scheduler.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold ({scheduler.long_prefill_token_threshold}) cannot be greater than the "
                f"max_model_len ({scheduler.max_model_len})."
            )
    if not 1 <= long_partial <= partial:
        raise ConfigError(
            f"max_long_partial_prefills ({long_partial}) must be greater than or equal to 1 and less than or equal "
            f"to max_num_partial_prefills ({partial})."
        )


def check_tracing(parts: str | None, endpoint: str | None) -> None:
    """Checks --collect-detailed-traces and --otlp-traces-endpoint.

    Raises:
        ConfigError: a part is unknown, there is no endpoint for them, or OpenTelemetry is not installed.
    """
    for part in parts.split(",") if parts else ():
        if part not in _TRACED_PARTS:
            raise ConfigError(
                f"Invalid module {part} in collect_detailed_traces. Valid modules are {', '.join(_TRACED_PARTS)}."
            )
    if not endpoint:
        if parts:
            raise ConfigError("--collect-detailed-traces needs --otlp-traces-endpoint.")
        return
    if not _is_installed("opentelemetry.sdk") or not _is_installed("opentelemetry.exporter.otlp"):
        raise ConfigError(
            "--otlp-traces-endpoint needs the OpenTelemetry packages: pip install 'ascend-vllm[otel]', or "
            "opentelemetry-sdk and opentelemetry-exporter-otlp."
        )
    envs.otlp_traces_protocol()


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False
