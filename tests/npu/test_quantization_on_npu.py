"""Quantized checkpoints on a simulated NPU, eager and by graphs: a format of tests only, AWQ, W8A8 and ModelSlim."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.graphs import GraphConfig, GraphMode, default_piece_sizes
from ascend_vllm.config.quantization import SCHEMES
from ascend_vllm.engine.llm_engine import LLMEngine
from tests import quantized_checkpoints as formats
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
    defaults: dict[str, Any] = {"device": "npu", "max_num_seqs": 5, "num_gpu_blocks_override": 20}
    args = EngineArgs(
        model=directory,
        swap_space=0,
        disable_log_stats=True,
        async_scheduling=False,
        max_model_len=256,
        **(defaults | options),
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


AWQ = (formats.awq(64), {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True})
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
W8A8 = (formats.int8(), formats.compressed_tensors("int-quantized", _INT8, _TOKEN))


def _write(directory: pathlib.Path, name: str) -> tuple[str, str]:
    """Directories of a quantized checkpoint and of what it means."""
    if name == "ascend":
        writer, options = formats.modelslim("W8A8", has_bits=True)
        return formats.write(directory, writer, None, **options)
    return formats.write(directory, *(AWQ if name == "awq" else W8A8))


def test_awq_answers_are_those_of_what_the_checkpoint_means(tmp_path: pathlib.Path) -> None:
    """Captured graphs, as in eager steps, and as a CPU in float32."""
    quantized, meant = _write(tmp_path, "awq")
    expected = generate(make_engine(meant, device="cpu", dtype="float32", num_gpu_blocks_override=64))
    assert expected != generate(make_engine(str(formats.float_model()), enforce_eager=True, dtype="float16"))
    assert generate(make_engine(quantized, enforce_eager=True, quantization="awq")) == expected
    engine = make_engine(quantized, quantization="awq")
    assert engine.config.graphs.mode == GraphMode.CAPTURED
    assert generate(engine) == expected
    assert decode_step_launches(engine, PROMPTS[:3]) == [False]


def test_latent_attention_with_rounded_weights() -> None:
    """Its kv_b_proj is rounded, too, and then widened."""
    options = {"quantization": "weight_only_int8", "block_size": 64}
    model = tiny_model("deepseek-v3-512", "float16")
    expected = generate(make_engine(model, device="cpu", dtype="float32", **options), PROMPTS[:2], max_tokens=6)
    assert generate(make_engine(model, **options), PROMPTS[:2], max_tokens=6) == expected


@pytest.mark.parametrize("name", ["compressed-tensors", "ascend"])
def test_inputs_in_8_bits_are_captured(name: str, tmp_path: pathlib.Path) -> None:
    quantized, _ = _write(tmp_path, name)
    expected = generate(make_engine(quantized, enforce_eager=True, quantization=name))
    engine = make_engine(quantized)
    assert generate(engine) == expected
    assert decode_step_launches(engine, PROMPTS[:3]) == [False]


# the compiler, and what it is made of, have warnings of their own
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(toy.IN_APPLY, marks=pytest.mark.exhaustive),
        toy.WITH_ACTIVATIONS,
        "awq",
        pytest.param("compressed-tensors", marks=pytest.mark.exhaustive),
        "ascend",
    ],
)
def test_they_are_compiled(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_toy = name in toy.METHODS
    quantized, _ = (
        toy.checkpoints(tmp_path, "qwen2-64-shallow", "float16", name) if is_toy else _write(tmp_path, name)
    )
    expected = generate(make_engine(quantized, enforce_eager=True), PROMPTS[:2])
    monkeypatch.setenv("INFER_MODE", "PTA")
    monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path / "cache"))
    # it writes what tests never read, as long as anybody listens, which pytest does
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    engine = make_engine(quantized, max_num_seqs=2)
    assert engine.config.graphs == GraphConfig(GraphMode.COMPILED, (2,), 256, piece_sizes=default_piece_sizes(256))
    assert generate(engine, PROMPTS[:2]) == expected
    assert decode_step_launches(engine, PROMPTS[:2]) == [False]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["awq", "ascend"])
def test_two_devices_share_a_checkpoint(name: str, tmp_path: pathlib.Path) -> None:
    quantized, _ = _write(tmp_path, name)
    expected = generate(make_engine(quantized, enforce_eager=True), PROMPTS[:2])
    engine = make_engine(quantized, tensor_parallel_size=2)
    assert generate(engine, PROMPTS[:2]) == expected
