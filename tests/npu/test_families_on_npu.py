"""Families beyond the first five on a simulated NPU: what one on the CPU computes, or a refusal at start."""

from __future__ import annotations

import pathlib

import pytest

from ascend_vllm.errors import ConfigError
from tests.models import old_layouts
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, make_prompt, started_worker

PROMPT = make_prompt(150, seed=1)
NATIVE = ("falcon-2", "gemma", "gemma3", "glm", "glm4", "granite", "internlm3", "phi3", "starcoder2")
EXPERTS = ("deepseek-v2-512", "deepseek-v3-512", "mixtral", "qwen2-moe", "qwen3-moe")
OLD = ("baichuan-7b", "chatglm", "internlm", "internlm2", "minicpm", "qwen1")


def _generated(directory: str, device: str) -> list[int]:
    """A prompt in two chunks, and tokens after it."""
    worker = started_worker(directory, device=device, dtype="float16", block_size=64)
    with Driver(worker) as driver:
        driver.add("row", PROMPT)
        driver.step({"row": 70})
        driver.step({"row": 80})
        driver.steps(6)
        return driver.output("row")


@pytest.mark.parametrize("name", [*NATIVE, *EXPERTS, *OLD])
def test_tokens_are_those_of_the_cpu(name: str, tmp_path: pathlib.Path) -> None:
    directory = tiny_model(name) if name in NATIVE + EXPERTS else old_layouts.save(name, tmp_path)
    assert _generated(directory, "npu") == _generated(directory, "cpu")


def test_soft_caps_and_alibi_are_refused(tmp_path: pathlib.Path) -> None:
    for directory in (tiny_model("gemma2"), old_layouts.save("baichuan-13b", tmp_path)):
        with pytest.raises(ConfigError, match="its operators have no parameter for soft caps and ALiBi"):
            _generated(directory, "npu")
