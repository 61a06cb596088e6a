"""Quantized checkpoints from config.json to text, in a format that lives in tests only."""

from __future__ import annotations

import json
import logging
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.config.quantization import ENTRY_POINT_GROUP, SCHEMES, QuantizationConfig
from ascend_vllm.errors import ConfigError, ModelLoadError, UnsupportedFlagError
from ascend_vllm.layers.attention import ForwardContext
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.quantization.base import Activation, LinearLayer
from ascend_vllm.models.blocks import DecoderLayer
from ascend_vllm.models.loader import load_model
from tests import toy_quantization as toy
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import PagedDriver, make_model_config, random_tokens
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.worker.taped_steps import TapedSteps, note_taped_steps

PROMPTS = ["The quick brown fox", "Hello!", "Blocks of the cache hold keys and values; a request gets more"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def texts(directory: str, **options: Any) -> list[tuple[str, tuple[int, ...]]]:
    llm = LLM(directory, dtype="float32", max_model_len=160, kv_cache_memory_bytes="16M", block_size=16, **options)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(output.outputs[0].text, tuple(output.outputs[0].token_ids)) for output in outputs]


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format is known."""
    monkeypatch.setitem(SCHEMES, toy.METHOD, toy.TARGET)


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> TapedSteps:
    """Steps that were replayed or recorded."""
    return note_taped_steps(monkeypatch)


@pytest.mark.usefixtures("scheme")
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("name", ["opt", "opt-post-norm"])
def test_text_is_that_of_rounded_weights(
    name: str, enforce_eager: bool, tmp_path: pathlib.Path, taped: TapedSteps, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, rounded = toy.checkpoints(tmp_path, name)
    expected = texts(rounded, enforce_eager=enforce_eager)
    with caplog.at_level(logging.INFO):
        found = texts(quantized, enforce_eager=enforce_eager)
    assert found == expected
    assert found != texts(tiny_model(name), enforce_eager=True)
    # the model calls operators that are not recorded
    assert taped.num_rows == []
    assert ("Decoding is not replayed from tapes: aten." in caplog.text) != enforce_eager


@pytest.mark.usefixtures("scheme")
@pytest.mark.parametrize("computes", [toy.IN_APPLY, toy.BY_KERNELS])
@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied"])
def test_text_is_that_of_rounded_weights_with_tapes_and_without(
    name: str, computes: str, tmp_path: pathlib.Path, taped: TapedSteps
) -> None:
    quantized, rounded = toy.checkpoints(tmp_path, name, computes=computes)
    expected = texts(rounded, enforce_eager=True)
    assert texts(quantized) == expected
    assert 3 in taped.num_rows
    assert texts(quantized, enforce_eager=True) == expected
    assert expected != texts(tiny_model(name), enforce_eager=True)


def _round_trip(x: torch.Tensor) -> torch.Tensor:
    return toy.restore(*toy.round_rows(x), x.dtype)


def _rounding_forward(
    self: DecoderLayer, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decoder layer whose norms' results are rounded to 8 bits."""
    norm = self.input_layernorm
    normed = norm.forward(residual) if x is None else norm.forward_add(x, residual)
    x = self.self_attn.forward(_round_trip(normed), context)
    residual = context.of_outputs(residual)
    return self.mlp.forward(_round_trip(self.post_attention_layernorm.forward_add(x, residual))), residual


@pytest.fixture
def quantized_inputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """By the last part of a layer's name: whether its inputs came quantized, with a scale per token."""
    seen: dict[str, bool] = {}

    class Watched(toy.QuantizedInputs):
        def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
            if isinstance(x, tuple):
                levels, scales = x
                assert (levels.dtype, scales.dtype) == (torch.int8, torch.float32)
                assert (levels.shape[1], scales.shape) == (layer.in_features, (len(levels), 1))
            name = layer.prefix.rpartition(".")[2]
            assert seen.setdefault(name, isinstance(x, tuple)) == isinstance(x, tuple)
            return super().apply(layer, x)

    monkeypatch.setitem(toy.METHODS, toy.WITH_ACTIVATIONS, Watched)
    return seen


@pytest.mark.usefixtures("scheme")
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_norms_give_quantized_activations(
    name: str,
    enforce_eager: bool,
    tmp_path: pathlib.Path,
    quantized_inputs: dict[str, bool],
    taped: TapedSteps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the layers behind them compute is that of rounded results of norms."""
    quantized, rounded = toy.checkpoints(tmp_path, name, computes=toy.WITH_ACTIVATIONS)
    found = texts(quantized, enforce_eager=enforce_eager)
    assert (3 in taped.num_rows) != enforce_eager
    assert quantized_inputs == {
        "qkv_proj": True,
        "o_proj": False,
        "gate_up_proj": True,
        "down_proj": False,
        "lm_head": False,
    }
    coarse_weights = texts(rounded)
    monkeypatch.setattr(DecoderLayer, "forward", _rounding_forward)
    assert found == texts(rounded, enforce_eager=True)
    assert found != coarse_weights


@pytest.mark.usefixtures("scheme")
@pytest.mark.parametrize("name", ["opt", "opt-post-norm"])
def test_layer_norms_give_them_where_they_come_first(
    name: str, tmp_path: pathlib.Path, quantized_inputs: dict[str, bool]
) -> None:
    """What a norm behind a layer gives is added to as well."""
    quantized, rounded = toy.checkpoints(tmp_path, name, computes=toy.WITH_ACTIVATIONS)
    is_same = texts(quantized) == texts(rounded)
    names = ("qkv_proj", "out_proj", "fc1", "fc2")
    assert [quantized_inputs[layer] for layer in names] == [name == "opt", False, name == "opt", False]
    assert is_same == (name == "opt-post-norm")


@pytest.mark.usefixtures("scheme")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied"])
def test_ranks_share_a_quantized_checkpoint(name: str, size: int, tmp_path: pathlib.Path) -> None:
    quantized, rounded = (make_model_config(path) for path in toy.checkpoints(tmp_path, name))

    def run(context: BuildContext) -> list[torch.Tensor]:
        models = [load_model(config, LoadConfig(use_tqdm=False), context) for config in (quantized, rounded)]
        prompt = random_tokens(20, VOCAB_SIZE, seed=1)
        return [PagedDriver(rounded, model=model).step({0: prompt})[0] for model in models]

    for found, expected in on_ranks(size, run):
        torch.testing.assert_close(found, expected)


# ---- which formats there are -----------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that brings formats."""
    info = tmp_path / "packages" / "toy_format-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-format\nVersion: 1.0\n")
    names = {
        toy.METHOD: toy.TARGET,
        "qqq": toy.TARGET,
        "lost": "tests.toy_quantization:Lost",
        "number": "builtins:str",
    }
    lines = "".join(f"{name} = {target}\n" for name, target in names.items())
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{lines}")
    monkeypatch.syspath_prepend(str(info.parent))


def _set_quantization(directory: str, declared: dict[str, Any] | None) -> None:
    path = pathlib.Path(directory) / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config if declared is None else config | {"quantization_config": declared}))


@pytest.mark.usefixtures("package")
def test_a_package_brings_a_format(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, rounded = toy.checkpoints(tmp_path, "qwen2")
    expected = texts(rounded)
    assert texts(quantized) == expected
    assert texts(quantized, quantization=toy.METHOD) == expected
    # config.json need not name it
    _set_quantization(quantized, None)
    assert texts(quantized, quantization=toy.METHOD) == expected
    _set_quantization(quantized, {"bits": 8})
    assert texts(quantized, quantization="qqq") == expected
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(UnsupportedFlagError, match="--quantization qqq is not supported"):
        texts(quantized, quantization="qqq")
    with pytest.raises(ConfigError, match=r"Unknown quantization method: toy\. Must be one of"):
        texts(quantized, quantization=toy.METHOD)


@pytest.mark.usefixtures("package")
def test_the_command_line_takes_a_packages_format(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert EngineArgs.from_cli_args(parser.parse_args(["--quantization", toy.METHOD])).quantization == toy.METHOD
    assert parser.parse_args(["-q", "gptq"]).quantization == "gptq"
    assert parser.parse_args(["-q", "None"]).quantization is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--quantization", "int3"])
    assert "invalid choice: 'int3' (choose from" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"quant_method": "hqq"}, "quantization 'hqq' is not supported: serve the unquantised model, or its AWQ"),
        ({"quant_method": "unheard"}, "quantization 'unheard' is not supported; supported are"),
        ({"bits": 4}, "quantization_config in config.json has no quant_method; name the format with --quantization"),
        ({"quant_method": "lost"}, "quantization 'lost': cannot import tests.toy_quantization:Lost"),
        ({"quant_method": "number"}, "quantization 'number': builtins:str is no QuantScheme"),
        ({"quant_method": toy.METHOD, "computes": "never"}, "quantization_config says computes 'never'"),
    ],
)
def test_what_no_scheme_serves_is_refused(declared: dict[str, Any], words: str) -> None:
    config = make_model_config(tiny_model("qwen2"), quantization_config=declared)
    assert config.arch.quantization == QuantizationConfig(declared.get("quant_method"), declared)
    with pytest.raises(ModelLoadError, match=words):
        load_model(config, LoadConfig(use_tqdm=False), BuildContext(torch.float32, torch.device("cpu")))


def test_formats_are_known_without_torch() -> None:
    code = "import sys, ascend_vllm.config.quantization; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
