"""A KV cache in 8 bits: how many tokens it holds, and where its scales come from."""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.kv_cache import check_kv_cache, read_layer_scales
from ascend_vllm.attention.backend import AttentionSpec, ForwardBatch
from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.entrypoints.lmdeploy.config import PytorchEngineConfig, TurbomindEngineConfig
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.attention import Attention, ChannelScales, ForwardContext
from ascend_vllm.ops.registry import OPS
from ascend_vllm.platforms.facts import CPU, NPU
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES, KV_CACHE_FORMATS, LATENT, KVCacheFormat, KVCachePlan
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


def checkpoint_with(directory: pathlib.Path, tensors: dict[str, torch.Tensor], name: str = "qwen2") -> pathlib.Path:
    """A tiny model with more tensors."""
    shutil.copytree(tiny_model(name), directory)
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


@pytest.mark.parametrize("name", KV_CACHE_FORMATS)
def test_so_it_does_of_latents(name: str) -> None:
    """Of DeepSeek's widths: two scales for 576 numbers."""
    latents = KVCachePlan(LATENT, num_vectors=1, num_heads=1, width=512 + 64, scales_per_vector=2)
    plain = latents.spec(32, 8, 192, "bfloat16").block_bytes
    assert 1.98 < plain / latents.spec(32, 8, 192, "bfloat16", KV_CACHE_FORMATS[name]).block_bytes <= 2


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


def test_latents_have_the_scale_of_keys(tmp_path: pathlib.Path) -> None:
    answers = {}
    # the second cuts nearly all numbers
    for scale in (1 / 64, 1e-4):
        directory = tmp_path / str(scale)
        prefixes = [f"model.layers.{i}.self_attn" for i in range(NUM_LAYERS)]
        tensors = {f"{prefix}.k_scale": torch.tensor(scale) for prefix in prefixes}
        tensors |= {f"{prefix}.v_scale": torch.tensor(1.0) for prefix in prefixes}
        worker = worker_of(checkpoint_with(directory, tensors, "deepseek-v3"), "fp8", dtype="float32")
        assert scales_of(worker) == [(pytest.approx(scale), 1.0)] * NUM_LAYERS
        worker.initialize_cache(NUM_BLOCKS, 0)
        answers[scale] = generate(worker, make_prompt(40), GREEDY, 8)
    assert answers[1e-4] != answers[1 / 64]


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


# ---- int8 scales of checkpoints ------------------------------------------------------------------------------

# of the tiny Qwen2
NUM_KV_HEADS, HEAD_SIZE = 2, 16
NUM_CHANNELS = NUM_KV_HEADS * HEAD_SIZE


def modelslim_checkpoint(
    directory: pathlib.Path, scale: float = 0.03, tensors: dict[str, torch.Tensor | None] | None = None
) -> pathlib.Path:
    """A checkpoint of which ModelSlim has measured keys and values only; None removes a tensor."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, torch.Tensor | None] = {}
    for layer, part in itertools.product(range(NUM_LAYERS), "kv"):
        prefix = f"model.layers.{layer}.self_attn.{part}_proj.kv_cache"
        found[f"{prefix}_scale"] = scale * (1 + torch.rand(NUM_CHANNELS, generator=generator))
        found[f"{prefix}_offset"] = torch.randint(-9, 9, (NUM_CHANNELS,), generator=generator).float()
    found |= tensors or {}
    checkpoint_with(directory, {name: tensor for name, tensor in found.items() if tensor is not None})
    (file,) = directory.glob("*.safetensors")
    names = safetensors.torch.load_file(file)
    description = {name: "C8" if "kv_cache" in name else "FLOAT" for name in names}
    written(directory / "quant_model_description.json", description)
    return directory


def tokens_of(directory: pathlib.Path, cache_dtype: str, **options: Any) -> list[int]:
    config = EngineArgs(model=str(directory), device="cpu", dtype="float32", kv_cache_dtype=cache_dtype, **options)
    worker = Worker(config.create_engine_config())
    worker.load_model()
    worker.initialize_cache(NUM_BLOCKS)
    return generate(worker, make_prompt(60), GREEDY, 12)


def test_scales_of_channels_are_used(tmp_path: pathlib.Path) -> None:
    """Good ones hardly change a text; such that everything is rounded to zero do."""
    good, bad = modelslim_checkpoint(tmp_path / "good"), modelslim_checkpoint(tmp_path / "bad", scale=1e5)
    exact = tokens_of(good, "auto")
    assert tokens_of(good, "int8")[:4] == exact[:4] == tokens_of(bad, "auto")[:4]
    assert tokens_of(bad, "int8") != exact
    # computes its own
    assert tokens_of(bad, "int8_per_token_head") == tokens_of(good, "int8_per_token_head")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_bytes_by_channel(dtype: torch.dtype) -> None:
    """Against keys and values that were rounded before, in float64."""
    generator = torch.Generator().manual_seed(5)
    num_heads, num_tokens, block_size = 2 * NUM_KV_HEADS, 40, 16
    spec = AttentionSpec(num_heads, NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)
    query = torch.randn(num_tokens, num_heads * HEAD_SIZE, generator=generator).to(dtype)
    halves = (3 * torch.randn(2, num_tokens, NUM_CHANNELS, generator=generator)).to(dtype)
    scales = 0.02 + torch.rand(2, NUM_CHANNELS, generator=generator) / 20
    offsets = torch.randint(-40, 40, (2, NUM_CHANNELS), generator=generator).float()
    layer = Attention(spec, 0, dtype)
    layer.set_cache_format(KVCacheFormat("int8"))
    layer.set_channel_scales(ChannelScales(scales, offsets))
    backend = CpuAttention(block_size)
    cache_spec = layer.kv_cache_spec(block_size)
    cache = backend.make_cache(torch.zeros(4 * cache_spec.block_bytes, dtype=torch.uint8), 4, cache_spec)
    lengths = np.array([num_tokens], np.int32)
    step = ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.arange(num_tokens),
        slot_mapping=torch.arange(num_tokens) + block_size,
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.from_numpy(lengths),
        block_table=torch.tensor([[1, 2, 3]], dtype=torch.int32),
        logits_indices=torch.zeros(0, dtype=torch.int64),
        query_start_np=np.array([0, num_tokens], np.int32),
        seq_lens_np=lengths,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    found = layer.forward(query.clone(), *halves.clone(), ForwardContext(step, [cache], backend, None))
    wide, wide_scales, wide_offsets = halves.double(), scales.double()[:, None], offsets.double()[:, None]
    rounded = ((wide / wide_scales + wide_offsets).round().clamp(-128, 127) - wide_offsets) * wide_scales
    heads = rounded.view(2, 1, num_tokens, NUM_KV_HEADS, HEAD_SIZE).transpose(2, 3).contiguous()
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, num_tokens], dtype=torch.int32)
    truth = OPS["paged_attention"].reference(
        query.double().view(num_tokens, num_heads, HEAD_SIZE), *heads, table, starts, step.seq_lens, spec.scale, 0
    )
    assert found.dtype == dtype
    error = float((found.double() - truth.flatten(1)).abs().max())
    # sums of bytes are rounded in bfloat16 to multiples of 0.5, times scales of at most 0.07
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("k_proj.kv_cache_scale", torch.zeros(NUM_CHANNELS), "must have finite numbers, and scales positive ones"),
        ("v_proj.kv_cache_offset", torch.full((NUM_CHANNELS,), torch.inf), "must have finite numbers"),
        ("k_proj.kv_cache_scale", torch.ones(NUM_CHANNELS // 2), r"has shape \[16\], which is not a number for each"),
        ("v_proj.kv_cache_scale", torch.ones(3), r"has shape \[3\], which is not a number for each channel"),
        ("v_proj.kv_cache_scale", None, "layer 1 lacks scales of int8 keys or values"),
    ],
)
def test_bad_scales_of_channels(tmp_path: pathlib.Path, name: str, tensor: torch.Tensor | None, words: str) -> None:
    directory = modelslim_checkpoint(tmp_path / "model", tensors={f"model.layers.1.self_attn.{name}": tensor})
    with pytest.raises(ModelLoadError, match=words):
        tokens_of(directory, "int8")


def test_int8_has_the_layers_scales_of_compressed_tensors(tmp_path: pathlib.Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.k_scale": torch.tensor([0.5 + i]) for i in range(NUM_LAYERS)}
    tensors |= {f"model.layers.{i}.self_attn.v_scale": torch.tensor([0.125]) for i in range(NUM_LAYERS)}
    directory = checkpoint_with(tmp_path / "model", tensors)
    content = json.loads((directory / "config.json").read_text())
    groups = {
        "group_0": {"targets": ["re:nothing"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    }
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}

    def found(scheme: dict[str, Any], cache_dtype: str) -> list[tuple[float, float]]:
        declared = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
        written(directory / "config.json", content | {"quantization_config": declared | {"kv_cache_scheme": scheme}})
        config = EngineArgs(model=str(directory), device="cpu", dtype="float32", kv_cache_dtype=cache_dtype)
        worker = Worker(config.create_engine_config())
        worker.load_model()
        return scales_of(worker)

    assert found(scheme, "int8") == [(0.5, 0.125), (1.5, 0.125), (2.5, 0.125)]
    own = [(1.0, 1.0)] * NUM_LAYERS
    assert found(scheme, "int8_per_token_head") == own
    # others are not of layers
    assert found(scheme | {"strategy": "attn_head"}, "int8") == own


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
    args = EngineArgs(model=tiny_model("deepseek-v3"), device="cpu", kv_cache_dtype="int8")
    arch = args.create_engine_config().model.arch
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype int8 is not available on --device npu for models with latent attention"
    ):
        check_kv_cache(args, NPU, arch)


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
