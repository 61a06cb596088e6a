"""Families beyond the first five on a simulated NPU: what one on the CPU computes, or a refusal at start."""

from __future__ import annotations

import pytest

from ascend_vllm.errors import ConfigError
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, make_prompt, started_worker

PROMPT = make_prompt(150)


def _generated(name: str, device: str) -> list[int]:
    """A prompt in two chunks, and tokens after it."""
    worker = started_worker(tiny_model(name), device=device, dtype="float16", block_size=64)
    with Driver(worker) as driver:
        driver.add("row", PROMPT)
        driver.step({"row": 70})
        driver.step({"row": 80})
        driver.steps(6)
        return driver.output("row")


@pytest.mark.parametrize("name", ["falcon-2", "gemma3", "glm4", "phi3", "starcoder2"])
def test_tokens_are_those_of_the_cpu(name: str) -> None:
    assert _generated(name, "npu") == _generated(name, "cpu")


def test_soft_caps_are_refused() -> None:
    with pytest.raises(ConfigError, match="its operators have no parameter for soft caps and ALiBi"):
        _generated("gemma2", "npu")
