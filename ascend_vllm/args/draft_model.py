"""Finds the draft model or EAGLE head of speculative decoding, and reads its config.json as the target's is read."""

from __future__ import annotations

import pathlib

import msgspec

from ascend_vllm import envs
from ascend_vllm.args import hf_checks, hf_files, limits
from ascend_vllm.args.kv_cache import check_kv_cache
from ascend_vllm.args.quantization_files import check_quantization
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.speculation import HEAD_ARCHITECTURES, SpeculativeMethod
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import DeviceFacts

logger = init_logger(__name__)

# one of these tokenizers' files must be there, and all that both models have must be equal
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "qwen.tiktoken")


def draft_config(
    args: EngineFlags,
    method: SpeculativeMethod,
    name: str,
    target: ModelConfig,
    facts: DeviceFacts,
    *,
    quantization: str | None,
    revision: str | None,
) -> ModelConfig:
    """The configuration of a draft model or EAGLE head.

    Args:
        args: the flags.
        method: not n-grams.
        name: a directory, or a repository on the Hugging Face hub.
        target: the model that is served; its draft has the same tokenizer, dtype and seed.
        facts: of the device.
        quantization: of the draft; None: config.json decides.
        revision: of the repository.

    Returns:
        With the longest sequence of the draft itself; that of an EAGLE head is the target's.

    Raises:
        ConfigError: it cannot be found, or does not fit the target.
        UnsupportedFlagError: a quantization of vLLM that there is not here.
        ModelLoadError: its config.json is missing or broken.
    """
    hf_checks.check_advice("--speculative-model-quantization", quantization)
    load_format = "dummy" if args.load_format == "dummy" else "auto"
    directory = hf_files.find_model_directory(
        name, revision, args.download_dir, load_format, flag="--speculative-model"
    )
    hf_config = hf_files.read_hf_config(directory, trust_remote_code=args.trust_remote_code)
    check_quantization(quantization, hf_config["quantization_config"])
    is_head = method in HEAD_ARCHITECTURES
    if is_head:
        # it names that of a Llama, or one that only vLLM has
        hf_config["architectures"] = [HEAD_ARCHITECTURES[method]]
        _check_style()
    arch = ArchConfig.from_hf(hf_config, quantization)
    hf_checks.check_head_size(hf_config)
    check_kv_cache(args, facts, arch)
    longest = target.max_model_len if is_head else limits.resolve_max_model_len(None, arch)
    draft = msgspec.structs.replace(
        target,
        model=directory,
        architecture=hf_config["architectures"][0],
        arch=arch,
        generation_config={},
        dtype=limits.resolve_dtype(target.dtype, None, facts, hf_config.get("model_type")),
        max_model_len=longest,
        source=name,
    )
    _check_vocabulary(target, draft)
    if args.tensor_parallel_size > 1:
        logger.info("The draft model is computed whole on the worker that samples, not by all workers.")
    return draft


def _check_style() -> None:
    if not envs.eagle_use_safe_ai_lab_style():
        logger.warning(
            "EAGLE_USE_SAFE_AI_LAB_STYLE=0 has no effect: EAGLE heads are computed as SafeAILab trains them; the "
            "other way accepts half as many of their drafts."
        )


def _check_vocabulary(target: ModelConfig, draft: ModelConfig) -> None:
    """Vocabularies of different sizes are right only where models of one family are padded differently."""
    if target.vocab_size == draft.vocab_size:
        return
    if not (draft.arch.eagle is None and _have_same_tokenizer(pathlib.Path(target.tokenizer), draft.model)):
        raise ConfigError(
            f"Target and draft model should have the same vocabulary size. Target model vocab_size="
            f"{target.vocab_size}. Draft model vocab_size={draft.vocab_size}. Using models with different tokenizers "
            "can cause out-of-bounds errors during speculative decoding."
        )


def _have_same_tokenizer(directory: pathlib.Path, draft_directory: str) -> bool:
    pairs = ((directory / name, pathlib.Path(draft_directory) / name) for name in _TOKENIZER_FILES)
    common = [(one, other) for one, other in pairs if one.is_file() and other.is_file()]
    return bool(common) and all(one.read_bytes() == other.read_bytes() for one, other in common)
