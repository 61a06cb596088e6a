"""Quantized checkpoints on a simulated NPU, in a format that lives in tests only: eager steps and graphs."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.graphs import GraphConfig, GraphMode
from ascend_vllm.config.quantization import SCHEMES
from ascend_vllm.engine.llm_engine import LLMEngine
from tests import toy_quantization as toy
from tests.npu.test_graphs import PROMPTS, decode_step_launches, generate
from tests.tiny_models import tiny_model

# with heads of 64, which attention has kernels of its own for
MODEL = "qwen2-64"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format is known, and no variables are set."""
    for name in ("INFER_MODE", "PTA_TORCHAIR_DECODE_GEAR_ENABLE", "PTA_TORCHAIR_DECODE_GEAR_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setitem(SCHEMES, toy.METHOD, toy.TARGET)


def make_engine(directory: str, **options: Any) -> LLMEngine:
    args = EngineArgs(
        model=directory,
        device="npu",
        swap_space=0,
        disable_log_stats=True,
        async_scheduling=False,
        max_model_len=256,
        num_gpu_blocks_override=20,
        **({"max_num_seqs": 5} | options),
    )
    return LLMEngine(args.create_engine_config())


@pytest.mark.parametrize("model", [MODEL, "qwen2-tied"])
def test_text_is_that_of_rounded_weights(model: str, tmp_path: pathlib.Path) -> None:
    """By eager steps and by captured graphs."""
    quantized, rounded = toy.checkpoints(tmp_path, model, "float16")
    expected = generate(make_engine(rounded, enforce_eager=True))
    assert expected != generate(make_engine(tiny_model(model, "float16"), enforce_eager=True))
    assert generate(make_engine(quantized, enforce_eager=True)) == expected
    engine = make_engine(quantized)
    assert engine.config.graphs.mode == GraphMode.CAPTURED
    assert generate(engine) == expected
    assert decode_step_launches(engine, PROMPTS[:3]) == [False]


def test_quantized_activations_are_captured(tmp_path: pathlib.Path) -> None:
    quantized, rounded = toy.checkpoints(tmp_path, MODEL, "float16", toy.WITH_ACTIVATIONS)
    expected = generate(make_engine(quantized, enforce_eager=True))
    assert expected != generate(make_engine(rounded, enforce_eager=True))
    engine = make_engine(quantized)
    assert generate(engine) == expected
    assert decode_step_launches(engine, PROMPTS[:3]) == [False]


# the compiler, and what it is made of, have warnings of their own
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("computes", [pytest.param(toy.IN_APPLY, marks=pytest.mark.exhaustive), toy.WITH_ACTIVATIONS])
def test_they_are_compiled(computes: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _ = toy.checkpoints(tmp_path, "qwen2-64-shallow", "float16", computes)
    expected = generate(make_engine(quantized, enforce_eager=True), PROMPTS[:2])
    monkeypatch.setenv("INFER_MODE", "PTA")
    monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path / "cache"))
    # it writes what tests never read, as long as anybody listens, which pytest does
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    engine = make_engine(quantized, max_num_seqs=2)
    assert engine.config.graphs == GraphConfig(GraphMode.COMPILED, (2,), 256)
    assert generate(engine, PROMPTS[:2]) == expected
    assert decode_step_launches(engine, PROMPTS[:2]) == [False]
