"""How families read their options from config.json."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm.models.llama import LlamaForCausalLM
from ascend_vllm.models.mistral import MistralForCausalLM
from ascend_vllm.models.qwen2 import Qwen2ForCausalLM, sliding_window_of_layer
from ascend_vllm.models.qwen3 import Qwen3ForCausalLM

WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32}


@pytest.mark.parametrize(
    ("hf_config", "windows"),
    [
        ({}, [None, None, None]),
        ({"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 0}, [None, None, None]),
        # what transformers makes of a config without use_sliding_window
        ({"use_sliding_window": True, "sliding_window": None}, [None, None, None]),
        (WINDOW | {"max_window_layers": 2}, [None, None, 32]),
        (WINDOW | {"max_window_layers": 28}, [None, None, None]),
        (WINDOW | {"max_window_layers": 2, "layer_types": None}, [None, None, 32]),
        (
            WINDOW
            | {"max_window_layers": 0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            [32, None, 32],
        ),
    ],
)
def test_windows_of_qwen_layers(hf_config: dict[str, Any], windows: list[int | None]) -> None:
    assert [sliding_window_of_layer(hf_config, index) for index in range(3)] == windows
    assert [Qwen2ForCausalLM.layer_options(hf_config, index).sliding_window for index in range(3)] == windows
    assert [Qwen3ForCausalLM.layer_options(hf_config, index).sliding_window for index in range(3)] == windows


def test_mistral_has_one_window() -> None:
    assert MistralForCausalLM.layer_options({"sliding_window": 4096}, 0).sliding_window == 4096
    assert MistralForCausalLM.layer_options({"sliding_window": None}, 0).sliding_window is None


def test_biases() -> None:
    llama = LlamaForCausalLM.layer_options({"attention_bias": True}, 0)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, False)
    assert LlamaForCausalLM.layer_options({"mlp_bias": True}, 0).mlp_bias
    qwen2 = Qwen2ForCausalLM.layer_options({}, 0)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = Qwen3ForCausalLM.layer_options({}, 0)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
