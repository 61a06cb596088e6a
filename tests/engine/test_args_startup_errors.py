"""The start-up errors of vLLM 0.6.3, word for word, also where the feature itself is missing."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
NGRAM: dict[str, Any] = {"speculative_model": "[ngram]", "num_speculative_tokens": 3}
WITHOUT_LENGTH = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}


def make_model(directory: pathlib.Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def error_of(directory: pathlib.Path, config: dict[str, Any], values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(model=make_model(directory, config), device="cpu", **values).create_engine_config()
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"max_lora_rank": 7, "enable_lora": True},
            "max_lora_rank (7) must be one of (8, 16, 32, 64, 128, 256).",
        ),
        ({"max_loras": 0, "enable_lora": True}, "max_loras (0) must be >= 1."),
        ({"max_cpu_loras": 2, "max_loras": 3}, "max_cpu_loras (2) must be >= max_loras (3)"),
        ({"lora_extra_vocab_size": 1}, "lora_extra_vocab_size (1) must be one of (0, 256, 512)."),
        (
            NGRAM | {"num_scheduler_steps": 2, "ngram_prompt_lookup_max": 4},
            "Speculative decoding is not supported with multi-step (--num-scheduler-steps > 1)",
        ),
        (
            {"num_scheduler_steps": 2, "enable_chunked_prefill": True, "pipeline_parallel_size": 2},
            "Multi-Step Chunked-Prefill is not supported for pipeline-parallel-size > 1",
        ),
        (
            NGRAM | {"use_v2_block_manager": False},
            "Speculative decoding requires usage of the V2 block manager. Enable it with --use-v2-block-manager.",
        ),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens was provided without speculative_model."),
        (
            {"speculative_model": "/no/draft"},
            "num_speculative_tokens must be provided with speculative_model unless the draft model config contains "
            "an n_predict parameter.",
        ),
        (
            {"speculative_model": "/no/draft", "num_speculative_tokens": 0},
            "Expected num_speculative_tokens to be greater than zero (0).",
        ),
        (
            {
                "speculative_model": "/no/draft",
                "num_speculative_tokens": 2,
                "speculative_draft_tensor_parallel_size": 2,
            },
            "speculative_draft_tensor_parallel_size=2 cannot be other value than 1",
        ),
        (NGRAM | {"ngram_prompt_lookup_max": 0}, "ngram_prompt_lookup_max=0 must be > 0"),
        (
            NGRAM | {"ngram_prompt_lookup_max": 2, "ngram_prompt_lookup_min": 0},
            "ngram_prompt_lookup_min=0 must be > 0",
        ),
        (
            NGRAM | {"ngram_prompt_lookup_max": 2, "ngram_prompt_lookup_min": 3},
            "ngram_prompt_lookup_min=3 cannot be larger than ngram_prompt_lookup_max=2",
        ),
        (
            {"tensor_parallel_size": 3},
            "Total number of attention heads (4) must be divisible by tensor parallel size (3).",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_values_are_reported_before_missing_features(
    values: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    assert error_of(tmp_path, CONFIG, values) == message


def test_quantization_that_contradicts_the_checkpoint(tmp_path: pathlib.Path) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": "gptq"}}
    assert error_of(tmp_path, config, {"quantization": "awq"}) == (
        "Quantization method specified in the model config (gptq) does not match the quantization method specified "
        "in the `quantization` argument (awq)."
    )
    assert error_of(tmp_path, config, {"quantization": "awq_marlin"}) == (
        "Quantization method specified in the model config (gptq) does not match the quantization method specified "
        "in the `quantization` argument (awq_marlin)."
    )
    assert error_of(tmp_path, CONFIG, {"quantization": "bitsandbytes"}) == (
        "--quantization bitsandbytes is not supported: serve the unquantised model, or its AWQ, GPTQ or "
        "compressed-tensors checkpoint"
    )


def test_sliding_windows_and_chunked_prefill(tmp_path: pathlib.Path) -> None:
    config = CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024}
    values = {"use_v2_block_manager": False, "enable_chunked_prefill": True}
    assert error_of(tmp_path, config, values) == (
        "Chunked prefill is not supported with sliding window. Set --disable-sliding-window to disable sliding "
        "window."
    )
    # only 0.6.3's older block manager had this limit
    for better in ({"use_v2_block_manager": True}, {"disable_sliding_window": True}):
        made = EngineArgs(model=str(tmp_path), device="cpu", **(values | better)).create_engine_config()
        assert made.scheduler.enable_chunked_prefill


@pytest.mark.parametrize("key", ["n_positions", "max_seq_len", "seq_length", "model_max_length", "seq_len"])
def test_keys_for_the_maximum_length(key: str, tmp_path: pathlib.Path) -> None:
    config = WITHOUT_LENGTH | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], key: 128}
    config["max_position_embeddings"] = 256
    message = error_of(tmp_path, config, {"max_model_len": 129})
    assert message.startswith(
        "User-specified max_model_len (129) is greater than the derived max_model_len "
        f"({key}=128 or model_max_length="
    )


def test_the_programs_end_with_2_and_the_text(tmp_path: pathlib.Path) -> None:
    """Through the command line: what argparse refuses, and what the checks refuse, is one line and exit code 2."""
    model = make_model(tmp_path, CONFIG)
    for words, text in (
        (["--max-lora-rank", "7", "--enable-lora"], "max_lora_rank (7) must be one of (8, 16, 32, 64, 128, 256)."),
        (["--lora-modules", "{name"], "Invalid JSON format for --lora-modules: {name"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ascend_vllm.entrypoints.cli", "serve", model, "--port", "0", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert text in done.stderr
