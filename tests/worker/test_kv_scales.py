"""A KV cache in 8 bits: how many tokens it holds, and where its scales come from."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.kv_cache import check_kv_cache, read_layer_scales
from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.entrypoints.lmdeploy.config import PytorchEngineConfig, TurbomindEngineConfig
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.platforms.facts import CPU, NPU
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES, KV_CACHE_FORMATS
from ascend_vllm.worker.worker import Worker
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, NUM_BLOCKS, generate, make_config, make_prompt

NUM_LAYERS = 3


def worker_of(directory: str | pathlib.Path, cache_dtype: str, **options: Any) -> Worker:
    worker = Worker(make_config(str(directory), cache_dtype=cache_dtype, **options))
    worker.load_model()
    return worker


def scales_of(worker: Worker) -> list[tuple[float, float]]:
    return [(layer.spec.k_scale, layer.spec.v_scale) for layer in worker.get_model().attention_layers]


def checkpoint_with(directory: pathlib.Path, tensors: dict[str, torch.Tensor]) -> pathlib.Path:
    """The tiny Qwen2 with more tensors."""
    shutil.copytree(tiny_model("qwen2"), directory)
    (file,) = directory.glob("*.safetensors")
    loaded = safetensors.torch.load_file(file)
    safetensors.torch.save_file(loaded | tensors, file, metadata={"format": "pt"})
    return directory


def written(path: pathlib.Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def scale_file(scales: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen2", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": scales}} | more


# ---- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KV_CACHE_FORMATS)
@pytest.mark.parametrize("head_size", [64, 128])
def test_the_same_memory_holds_almost_twice_the_tokens(name: str, head_size: int) -> None:
    plain = KEYS_AND_VALUES.spec(32, 2, head_size, "bfloat16").block_bytes
    assert 1.9 < plain / KEYS_AND_VALUES.spec(32, 2, head_size, "bfloat16", KV_CACHE_FORMATS[name]).block_bytes <= 2


def test_workers_count_the_blocks(tmp_path: pathlib.Path) -> None:
    """Of a model of 64 numbers a head."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    content = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 2, "vocab_size": 64}
    written(tmp_path / "config.json", content | sizes | {"torch_dtype": "bfloat16", "max_position_embeddings": 256})
    blocks = {}
    for name in ("auto", "int8"):
        flags: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory_bytes": "16M", "kv_cache_dtype": name}
        config = EngineArgs(model=str(tmp_path), device="cpu", enable_prefix_caching=True, **flags)
        worker = Worker(config.create_engine_config())
        worker.load_model()
        blocks[name] = worker.determine_num_blocks()
    assert blocks["int8"] >= 1.9 * blocks["auto"] > 100


# ---- scales of checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_fp8_has_the_scales_of_the_checkpoint(tmp_path: pathlib.Path, key: str, value: str) -> None:
    tensors = {f"model.layers.{i}.{key}": torch.tensor(0.5 + i) for i in range(NUM_LAYERS)}
    tensors |= {f"model.layers.{i}.{value}": torch.tensor([0.125]) for i in range(NUM_LAYERS)}
    directory = checkpoint_with(tmp_path / "model", tensors)
    assert scales_of(worker_of(directory, "fp8")) == [(0.5, 0.125), (1.5, 0.125), (2.5, 0.125)]
    # they are scales of E4M3
    for other in ("auto", "int8", "fp8_e5m2", "fp8_per_token_head"):
        assert scales_of(worker_of(directory, other)) == [(1.0, 1.0)] * NUM_LAYERS


def test_old_checkpoints_have_one_scale_for_both(tmp_path: pathlib.Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(0.25) for i in range(NUM_LAYERS)}
    assert scales_of(worker_of(checkpoint_with(tmp_path / "model", tensors), "fp8")) == [(0.25, 0.25)] * NUM_LAYERS


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.layers.1.self_attn.kv_scale": torch.tensor(0.25)}, "layer 0 lacks k_scale or v_scale"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}, "k_scale must be a positive number, got 0.0"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(2)}, r"k_scale must be one number, got shape \[2\]"),
    ],
)
def test_bad_scales_of_a_checkpoint(tmp_path: pathlib.Path, tensors: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        worker_of(checkpoint_with(tmp_path / "model", tensors), "fp8")


# ---- scales of files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scales_of_a_file_are_used(name: str) -> None:
    """Good ones hardly change a text; such that everything is rounded to zero, or cut, do."""
    prompt = make_prompt(60)

    def text(scale: float) -> list[int]:
        worker = worker_of(tiny_model("qwen2"), name, layer_scales=((scale,) * NUM_LAYERS,))
        assert scales_of(worker) == [(scale, scale)] * NUM_LAYERS
        worker.initialize_cache(NUM_BLOCKS)
        return generate(worker, prompt, GREEDY, 12)

    exact = worker_of(tiny_model("qwen2"), "auto")
    exact.initialize_cache(NUM_BLOCKS)
    good = 0.05 if name == "int8" else 0.02
    assert text(good)[:2] == generate(exact, prompt, GREEDY, 12)[:2]
    assert text(1e5) != text(good) != text(1e-6)


def test_each_rank_has_its_scales(tmp_path: pathlib.Path) -> None:
    ranks = {"0": {"0": 0.5, "1": 1, "2": 3}, "1": {"0": 0.25, "1": 2.0, "2": 4}}
    path = written(tmp_path / "scales.json", scale_file(ranks))
    flags: dict[str, Any] = {"kv_cache_dtype": "int8", "quantization_param_path": path, "tensor_parallel_size": 2}
    config = EngineArgs(model=tiny_model("qwen2"), device="cpu", **flags).create_engine_config()
    assert config.cache.layer_scales == ((0.5, 1.0, 3.0), (0.25, 2.0, 4.0))
    assert config.cache.format is not None and not config.cache.format.has_scales


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "scales.json"),
        ({"model_type": None}, "it has no object kv_cache"),
        (
            scale_file({"0": {"0": 1.0, "1": 1.0}}, model_type="llama"),
            "model_type is 'llama', the model's is 'qwen2'",
        ),
        ({"kv_cache": {"dtype": "int8"}}, "kv_cache.dtype must be float8_e4m3fn, got 'int8'"),
        (scale_file({}), r"must have the ranks 0 to 0 of --tensor-parallel-size 1, got \[\]"),
        (scale_file({"0": {}, "1": {}}), r"got \['0', '1'\]"),
        (scale_file({"0": {"0": 1.0, "2": 1}}), "of rank 0 and layer 1 must be a positive number, got None"),
        (scale_file({"0": {"0": 1.0, "1": 0}}), "layer 1 must be a positive number, got 0"),
        (scale_file({"0": {"0": True, "1": 1}}), "layer 0 must be a positive number, got True"),
        (scale_file({"0": 1.0}), "layer 0 must be a positive number, got None"),
    ],
)
def test_a_bad_file_is_an_error(tmp_path: pathlib.Path, content: Any, words: str) -> None:
    path = written(tmp_path / "scales.json", content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_layer_scales(path, NUM_LAYERS, 1, "qwen2")
    assert str(caught.value).startswith("--quantization-param-path")


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--quantization-param-path: /no/such/file\.json cannot be read"):
        read_layer_scales("/no/such/file.json", NUM_LAYERS, 1, "qwen2")


# ---- where it works ------------------------------------------------------------------------------------------


def test_where_it_is_refused() -> None:
    args = EngineArgs(model=tiny_model("qwen2"), device="cpu", kv_cache_dtype="fp8")
    arch = args.create_engine_config().model.arch
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 is not available on --device npu, .* use int8"):
        check_kv_cache(args, NPU, arch)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 is not available for models with latent attention"):
        EngineArgs(model=tiny_model("deepseek-v3"), device="cpu", kv_cache_dtype="fp8").create_engine_config()


def test_scales_of_integers_are_not_those_of_floats() -> None:
    args = EngineArgs(model=tiny_model("qwen2"), device="cpu", kv_cache_dtype="fp8")
    arch = args.create_engine_config().model.arch
    for kind in ("float", "int"):
        scheme = {"kv_cache_scheme": {"type": kind, "num_bits": 8, "strategy": "tensor"}}
        arch = msgspec.structs.replace(arch, quantization=QuantizationConfig("compressed-tensors", scheme))
        if kind == "float":
            check_kv_cache(args, CPU, arch)
            continue
        with pytest.raises(
            ConfigError, match=r"--kv-cache-dtype fp8: the checkpoint's scales .* are those of integers"
        ):
            check_kv_cache(args, CPU, arch)


@pytest.mark.parametrize("kind", [TurbomindEngineConfig, PytorchEngineConfig])
def test_the_pipeline_of_lmdeploy_asks_for_it(kind: Any) -> None:
    found = {policy: kind(quant_policy=policy).engine_args()["kv_cache_dtype"] for policy in (0, 4, 8)}
    assert found == {0: "auto", 4: "int8", 8: "int8"}
