"""Checks of flags of unsupported features: invalid values are reported first, with vLLM 0.6.3's text."""

from __future__ import annotations

from ascend_vllm.args import hf_checks
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.errors import ConfigError

LORA_RANKS = (8, 16, 32, 64, 128, 256)
LORA_EXTRA_VOCAB_SIZES = (0, 256, 512)
_NGRAM = "[ngram]"


def check_features(args: EngineFlags) -> None:
    """Checks the flags of LoRA and speculative decoding, and their combinations.

    Raises:
        ConfigError: a value is out of range, requires another that is missing, or excludes another.
    """
    if args.num_scheduler_steps > 1 and (args.speculative_model or args.speculative_config):
        raise ConfigError("Speculative decoding is not supported with multi-step (--num-scheduler-steps > 1)")
    if args.num_scheduler_steps > 1 and args.enable_chunked_prefill and args.pipeline_parallel_size > 1:
        raise ConfigError("Multi-Step Chunked-Prefill is not supported for pipeline-parallel-size > 1")
    _check_lora(args)
    _check_speculation(args)


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


def _check_speculation(args: EngineFlags) -> None:
    num_tokens = args.num_speculative_tokens
    if args.speculative_model is None:
        if num_tokens is not None:
            raise ConfigError("num_speculative_tokens was provided without speculative_model.")
        return
    if args.enable_chunked_prefill:
        raise ConfigError(
            "Speculative decoding and chunked prefill are currently mutually exclusive (enable_chunked_prefill=True)."
        )
    if not args.use_v2_block_manager:
        raise ConfigError(
            "Speculative decoding requires usage of the V2 block manager. Enable it with --use-v2-block-manager."
        )
    if args.speculative_model == _NGRAM:
        _check_ngram(args)
    if num_tokens is None and (args.speculative_model == _NGRAM or not hf_checks.predicts(args.speculative_model)):
        raise ConfigError(
            "num_speculative_tokens must be provided with speculative_model unless the draft model config contains "
            "an n_predict parameter."
        )
    if num_tokens is not None and num_tokens <= 0:
        raise ConfigError(f"Expected num_speculative_tokens to be greater than zero ({num_tokens}).")
    draft_size = args.speculative_draft_tensor_parallel_size
    if draft_size not in (None, 1):
        raise ConfigError(f"speculative_draft_tensor_parallel_size={draft_size} cannot be other value than 1")


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
