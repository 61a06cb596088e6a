"""Checks of flags of features, with vLLM 0.6.3's texts."""

from __future__ import annotations

from ascend_vllm.args import speculation
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.errors import ConfigError

LORA_RANKS = (8, 16, 32, 64, 128, 256)
LORA_EXTRA_VOCAB_SIZES = (0, 256, 512)


def check_features(args: EngineFlags) -> None:
    """Checks the flags of LoRA and speculative decoding, and their combinations.

    Raises:
        ConfigError: a value is out of range, requires another that is missing, or excludes another.
        UnsupportedFlagError: see `speculation.check_flags`.
    """
    if args.num_scheduler_steps > 1 and (args.speculative_model or args.speculative_config):
        raise ConfigError("Speculative decoding is not supported with multi-step (--num-scheduler-steps > 1)")
    if args.num_scheduler_steps > 1 and args.enable_chunked_prefill and args.pipeline_parallel_size > 1:
        raise ConfigError("Multi-Step Chunked-Prefill is not supported for pipeline-parallel-size > 1")
    _check_lora(args)
    speculation.check_flags(args)


def _check_lora(args: EngineFlags) -> None:
    if args.max_lora_rank not in LORA_RANKS:
        raise ConfigError(f"max_lora_rank ({args.max_lora_rank}) must be one of {LORA_RANKS}.")
    if args.lora_extra_vocab_size not in LORA_EXTRA_VOCAB_SIZES:
        raise ConfigError(
            f"lora_extra_vocab_size ({args.lora_extra_vocab_size}) must be one of {LORA_EXTRA_VOCAB_SIZES}."
        )
    if args.max_loras < 1:
        raise ConfigError(f"max_loras ({args.max_loras}) must be >= 1.")
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        raise ConfigError(f"max_cpu_loras ({args.max_cpu_loras}) must be >= max_loras ({args.max_loras})")
