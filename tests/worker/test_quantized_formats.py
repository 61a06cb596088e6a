"""Checkpoints in each format of quantized weights compute what transformers does with the weights that they mean."""

from __future__ import annotations

import functools
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.linear import RowParallelLinear
from ascend_vllm.layers.quantization.awq import AwqScheme
from ascend_vllm.layers.quantization.weight_only import arrange_groups
from ascend_vllm.models.loader import load_model
from tests import quantized_checkpoints as formats
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import PagedDriver, TransformersModel, load, make_model_config, random_tokens
from tests.tiny_models import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
PROMPT = random_tokens(24, VOCAB_SIZE, seed=20)
TOLERANCE = {"atol": 2e-4, "rtol": 0.0}

AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True}


def _packed(bits: int, group_size: int, *, symmetric: bool = True, actorder: str | None = None) -> dict[str, Any]:
    """A `quantization_config` of "pack-quantized"."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": actorder}
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    return formats.compressed_tensors("pack-quantized", weights | strategy)


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
# name → writer, quantization_config, and how it is written
WEIGHT_ONLY: dict[str, tuple[formats.Writer, dict[str, Any], dict[str, Any]]] = {
    "awq": (formats.awq(64), AWQ | {"group_size": 64}, {}),
    "awq per channel": (formats.awq(-1), AWQ | {"group_size": -1}, {}),
    "awq in part": (
        formats.awq(32),
        AWQ | {"group_size": 32, "modules_to_not_convert": ["layers.0.mlp"]},
        {"only": lambda name: "layers.0.mlp" not in name},
    ),
    "gptq": (formats.gptq(4, 32, symmetric=True, order="plain"), GPTQ | {"bits": 4, "group_size": 32}, {}),
    "gptq with a head": (
        formats.gptq(4, 64, symmetric=False),
        GPTQ | {"bits": 4, "group_size": 64, "sym": False, "lm_head": True},
        {"head": True},
    ),
    "gptq 2 bits": (formats.gptq(2, 32, symmetric=False), GPTQ | {"bits": 2, "group_size": 32, "sym": False}, {}),
    "gptq 3 bits": (formats.gptq(3, 64, symmetric=True), GPTQ | {"bits": 3, "group_size": 64}, {}),
    "gptq 8 bits": (formats.gptq(8, -1, symmetric=True), GPTQ | {"bits": 8, "group_size": -1}, {}),
    "gptq 8 bits v2": (
        formats.gptq(8, 64, symmetric=False, is_v2=True),
        GPTQ | {"bits": 8, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        {},
    ),
    "gptq act-order": (
        formats.gptq(4, 32, symmetric=False, order="act"),
        GPTQ | {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        {},
    ),
    "gptq static groups": (
        formats.gptq(4, 32, symmetric=True, order="plain"),
        GPTQ | {"bits": 4, "group_size": 32, "desc_act": True, "static_groups": True},
        {},
    ),
    "gptq dynamic": (
        lambda name, weight: formats.gptq(8 if "mlp" in name else 4, 32, symmetric=True)(name, weight),
        GPTQ
        | {
            "bits": 4,
            "group_size": 32,
            "dynamic": {r"-:.*layers\.0\.self_attn.*": {}, r"+:.*\.mlp\..*": {"bits": 8}},
        },
        {"only": lambda name: "layers.0.self_attn" not in name},
    ),
    "gptq with biases of zeros": (
        formats.gptq(4, 32, symmetric=True),
        GPTQ | {"bits": 4, "group_size": 32},
        {"more": {"model.layers.0.self_attn.o_proj.bias": torch.zeros(formats.HIDDEN)}},
    ),
    "W4A16": (formats.packed(4, 64, symmetric=True), _packed(4, 64), {}),
    "W4A16 asymmetric": (
        formats.packed(4, 32, symmetric=False),
        _packed(4, 32, symmetric=False),
        {"more": {"model.layers.0.self_attn.k_scale": torch.ones(1)}},
    ),
    "W4A16 act-order": (
        formats.packed(4, 32, symmetric=True, order=True),
        _packed(4, 32, actorder="group"),
        {},
    ),
    "W8A16 in part": (
        formats.packed(8, -1, symmetric=True),
        _packed(8, -1) | {"ignore": ["lm_head", r"re:.*\.0\.mlp.*"]},
        {"only": lambda name: "layers.0.mlp" not in name},
    ),
    "W8A16 unpacked": (
        formats.int8(zero_points=True),
        formats.compressed_tensors("int-quantized", _INT8 | {"symmetric": False}),
        {},
    ),
    "FP8 per tensor": (
        formats.fp8("tensor"),
        formats.compressed_tensors("float-quantized", _FP8 | {"strategy": "tensor"}, _FP8 | {"strategy": "tensor"}),
        {"more": {"model.layers.0.mlp.down_proj.input_scale": torch.ones(1)}},
    ),
    "FP8 dynamic": (
        formats.fp8("channel"),
        formats.compressed_tensors(
            "float-quantized", _FP8 | {"strategy": "channel"}, _FP8 | {"strategy": "token", "dynamic": True}
        ),
        {},
    ),
    "FP8 blocks": (
        formats.fp8("block"),
        formats.compressed_tensors("float-quantized", _FP8 | {"strategy": "block", "block_structure": [64, 64]}),
        {},
    ),
    "fp8 per tensor": (
        formats.fp8("tensor"),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        {"more": {"model.layers.0.self_attn.q_proj.input_scale": torch.ones(1)}},
    ),
    "fp8 per channel": (formats.fp8("channel"), {"quant_method": "fbgemm_fp8"}, {}),
    "fp8 blocks": (
        formats.fp8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [64, 64]},
        {"only": lambda name: "layers.0.mlp" not in name},
    ),
    "W8A16 asymmetric": (formats.packed(8, 32, symmetric=False), _packed(8, 32, symmetric=False), {}),
}


@functools.cache
def original() -> torch.Tensor:
    """Log-probabilities of the model that was quantized."""
    return PagedDriver(make_model_config(formats.float_model())).step({0: PROMPT})[0]


def made(name: str, directory: pathlib.Path) -> tuple[str, str]:
    writer, declared, options = WEIGHT_ONLY[name]
    return formats.write(directory, writer, declared, **options)


MALFORMED = "quantization_config in config.json, or the file beside it is malformed: "


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_are_those_that_the_checkpoint_means(name: str, tmp_path: pathlib.Path) -> None:
    quantized, meant = made(name, tmp_path)
    found = PagedDriver(make_model_config(quantized)).step({0: PROMPT})[0]
    torch.testing.assert_close(found, TransformersModel(meant).log_probs(PROMPT), **TOLERANCE)
    assert (found - original()).abs().max() > 0.005


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_ranks_share_quantized_matrices(name: str, tmp_path: pathlib.Path) -> None:
    quantized, meant = made(name, tmp_path)
    config = make_model_config(quantized)

    def run(context: BuildContext) -> torch.Tensor:
        return PagedDriver(config, model=load_model(config, LoadConfig(use_tqdm=False), context)).step({0: PROMPT})[0]

    expected = TransformersModel(meant).log_probs(PROMPT)
    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_groups_that_ranks_cannot_split(tmp_path: pathlib.Path) -> None:
    quantized, _ = formats.write(tmp_path, formats.awq(64), AWQ | {"group_size": 64})
    config = make_model_config(quantized, num_attention_heads=8, num_key_value_heads=8)

    def run(context: BuildContext) -> None:
        load_model(config, LoadConfig(use_tqdm=False), context)

    with pytest.raises(ConfigError) as caught:
        on_ranks(8, run)
    assert str(caught.value) == (
        "--tensor-parallel-size 8 cannot split the 192 inputs of model.layers.0.mlp.down_proj, which are quantized "
        "in groups of 64; possible are 1, 2, 3, 4, 6, 12, 24, 48"
    )


# ---- inputs in 8 bits ------------------------------------------------------------------------------------------

Rounding = Callable[[torch.Tensor], torch.Tensor]
TOKENS = random_tokens(12, VOCAB_SIZE, seed=21)
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
_SCALE, _ZERO = torch.tensor([0.04]), torch.tensor([-20], dtype=torch.int8)


def per_token(x: torch.Tensor) -> torch.Tensor:
    """x as symmetric 8 bits with a scale per token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def per_token_asymmetric(x: torch.Tensor) -> torch.Tensor:
    """x as 8 bits whose range is that of the token and 0."""
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


def static(scale: float, zero: int) -> Rounding:
    """Rounds to 8 bits of a given scale and zero."""
    return lambda x: (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


def expected_with_inputs(meant: str, rounding: Rounding) -> torch.Tensor:
    """Log-probabilities [T, V] of prompts of one token each, with rounded inputs of all layers but the head."""
    model = TransformersModel(meant).model
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _module, inputs: (rounding(inputs[0]),))
    with torch.inference_mode():
        return model(torch.tensor(TOKENS)[:, None]).logits[:, 0].log_softmax(-1)


def assert_rounded_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """A rounding that goes the other way changes one token much; that may happen, rarely."""
    differences = (found - expected).abs().amax(-1)
    assert differences.sort().values[-2] < 5e-4


# name → writer, quantization_config, rounding of inputs
ROUNDING_INPUTS: dict[str, tuple[formats.Writer, dict[str, Any] | None, Rounding]] = {
    "W8A8": (formats.int8(), formats.compressed_tensors("int-quantized", _INT8, _TOKEN), per_token),
    "W8A8 asymmetric": (
        formats.int8(),
        formats.compressed_tensors("int-quantized", _INT8, _TOKEN | {"symmetric": False}),
        per_token_asymmetric,
    ),
    "W8A8 static": (
        formats.int8(per_output=False, more={"input_scale": _SCALE}),
        formats.compressed_tensors("int-quantized", _INT8 | {"strategy": "tensor"}, _STATIC),
        static(0.04, 0),
    ),
    "W8A8 static asymmetric": (
        formats.int8(more={"input_scale": _SCALE, "input_zero_point": _ZERO}),
        formats.compressed_tensors("int-quantized", _INT8, _STATIC | {"symmetric": False}),
        static(0.04, -20),
    ),
}


@pytest.mark.parametrize("name", ROUNDING_INPUTS)
def test_inputs_are_rounded(name: str, tmp_path: pathlib.Path) -> None:
    writer, declared, rounding = ROUNDING_INPUTS[name]
    quantized, meant = formats.write(tmp_path, writer, declared)
    found = one_token_each(PagedDriver(make_model_config(quantized), max_rows=len(TOKENS)))
    assert_rounded_alike(found, expected_with_inputs(meant, rounding))
    assert (found - expected_with_inputs(meant, lambda x: x)).abs().max() > 0.02


def one_token_each(driver: PagedDriver) -> torch.Tensor:
    """Log-probabilities [T, V] of prompts of one token each, in one batch."""
    rows = driver.step({row: [token] for row, token in enumerate(TOKENS)})
    return torch.cat([rows[row] for row in range(len(TOKENS))])


@pytest.mark.parametrize("kind", ["per-tensor", "per-token"])
def test_smoothquant(kind: str, tmp_path: pathlib.Path) -> None:
    writer, options = formats.smoothquant(kind, kind, kind, kind, 0.04)
    quantized, meant = formats.write(tmp_path, writer, None, **options, architectures=["QuantizedQwen2ForCausalLM"])
    config = make_model_config(quantized)
    assert config.architecture == "Qwen2ForCausalLM"
    rounding = static(0.04, 0) if kind == "per-tensor" else per_token
    found = one_token_each(PagedDriver(config, max_rows=len(TOKENS)))
    assert_rounded_alike(found, expected_with_inputs(meant, rounding))


@pytest.mark.parametrize(
    ("kind", "has_bits", "rounding", "size"),
    [
        ("W8A8", False, static(0.04, -20), 1),
        ("W8A8", True, static(0.04, -20), 2),
        # ranks would have scales of their own
        ("W8A8_DYNAMIC", False, per_token, 1),
        ("W8A16", False, lambda x: x, 2),
    ],
)
def test_modelslim(kind: str, has_bits: bool, rounding: Rounding, size: int, tmp_path: pathlib.Path) -> None:
    writer, options = formats.modelslim(kind, has_bits=has_bits)
    # the bias is in quant_bias, too
    quantized, meant = formats.write(tmp_path, writer, None, **options)
    config = make_model_config(quantized)

    def run(context: BuildContext) -> torch.Tensor:
        model = load_model(config, LoadConfig(use_tqdm=False), context)
        return one_token_each(PagedDriver(config, max_rows=len(TOKENS), model=model))

    expected = expected_with_inputs(meant, rounding)
    for found in on_ranks(size, run):
        # biases of W8A8 are rounded to units of its scales
        assert_rounded_alike(found, expected)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"quant_config.json": {"qkv": "per-tensor", "out": "x", "fc1": "", "fc2": ""}},
            "'out': 'x'.* not supported",
        ),
        (
            {"quant_config.json": dict.fromkeys(("qkv", "out", "fc1", "fc2"), "per-token") | {"type": "fp8_e5m2"}},
            "'type': 'fp8_e5m2'} is not supported",
        ),
        (
            {"quant_model_description.json": {"model.layers.0.self_attn.q_proj.weight": "W8A8"}},
            "Detected some but not all shards of model.layers.0.self_attn.qkv_proj are quantized",
        ),
        (
            {"quant_model_description.json": {"model.layers.0.self_attn.o_proj.weight": "W4A8_DYNAMIC"}},
            "o_proj is quantized as W4A8_DYNAMIC; supported are W8A8, W8A8_DYNAMIC and W8A16",
        ),
    ],
)
def test_files_that_are_refused(files: dict[str, Any], words: str, tmp_path: pathlib.Path) -> None:
    quantized, _ = formats.write(tmp_path, formats.int8(), None, only=lambda _: False, files=files)
    with pytest.raises(ModelLoadError, match=words):
        load(make_model_config(quantized), "dummy")


# ---- made while loading ----------------------------------------------------------------------------------------


def rounded_weights(directory: pathlib.Path, code: str, *, head: bool) -> str:
    """The model whose weights are rounded as they are while loading."""
    writer = formats.fp8("channel") if code == "fp8" else formats.int8()
    return formats.write(directory, writer, None, head=head)[1]


@pytest.mark.parametrize(
    ("method", "head", "size"),
    [("weight_only_int8", True, 2), ("int8_per_channel_weight_only", False, 1), ("fp8", False, 2)],
)
def test_weights_are_rounded_while_loading(method: str, head: bool, size: int, tmp_path: pathlib.Path) -> None:
    config = make_model_config(formats.float_model())
    arch = msgspec.structs.replace(config.arch, quantization=QuantizationConfig(method))
    config = msgspec.structs.replace(config, arch=arch)

    def run(context: BuildContext) -> torch.Tensor:
        model = load_model(config, LoadConfig(use_tqdm=False, quantize_lm_head=head), context)
        return PagedDriver(config, model=model).step({0: PROMPT})[0]

    expected = TransformersModel(rounded_weights(tmp_path, method, head=head)).log_probs(PROMPT)
    for found in on_ranks(size, run):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_int8_activations_are_those_of_weights_in_codes() -> None:
    """The others' results stay as they are; these change by about what 8 bits are too few."""
    changes: dict[str | None, float] = {}
    for name in ("weight_only_int8", "fp8", None):
        config = make_model_config(formats.float_model())
        if name is not None:
            arch = msgspec.structs.replace(config.arch, quantization=QuantizationConfig(name))
            config = msgspec.structs.replace(config, arch=arch)
        found = []
        for rounds in (False, True):
            load_config = LoadConfig(use_tqdm=False, cpu_int8_activations=rounds)
            model = load_model(config, load_config, BuildContext(torch.float32, CPU))
            found.append(PagedDriver(config, model=model).step({0: PROMPT})[0])
        changes[name] = (found[1] - found[0]).abs().mean().item()
    assert 1e-4 < changes["weight_only_int8"] < 0.1
    assert changes["fp8"] == changes[None] == 0


def test_a_tied_head_is_rounded_and_its_embedding_is_not() -> None:
    """Also beside mixtures of experts, whose layers stay as they are."""
    for name in ("qwen2-tied", "qwen2-moe"):
        config = make_model_config(tiny_model(name))
        models = [
            load_model(config, LoadConfig(use_tqdm=False, quantize_lm_head=head), BuildContext(torch.float32, CPU))
            for head in (False, True)
        ]
        hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
        expected, found = (model.compute_logits(hidden) for model in models)
        assert 0 < (found - expected).abs().max() < 0.02 * expected.abs().max()
        tokens = torch.tensor([1, 7])
        embeddings = [model.embed_tokens.forward(tokens) for model in models]  # type: ignore[attr-defined]
        torch.testing.assert_close(*embeddings, rtol=0, atol=0)


def test_a_quantized_checkpoint_is_not_rounded_again(tmp_path: pathlib.Path) -> None:
    quantized, _ = formats.write(tmp_path, formats.int8(), {"bits": 8})
    with pytest.raises(ModelLoadError, match="makes 8-bit weights of an unquantized checkpoint, but this one is"):
        LLM(quantized, quantization="weight_only_int8", max_model_len=64, kv_cache_memory_bytes="8M")


def test_ranks_round_inputs_by_measured_scales(tmp_path: pathlib.Path) -> None:
    writer, declared, rounding = ROUNDING_INPUTS["W8A8 static asymmetric"]
    quantized, meant = formats.write(tmp_path, writer, declared)
    config = make_model_config(quantized)

    def run(context: BuildContext) -> torch.Tensor:
        model = load_model(config, LoadConfig(use_tqdm=False), context)
        return one_token_each(PagedDriver(config, max_rows=len(TOKENS), model=model))

    expected = expected_with_inputs(meant, rounding)
    for found in on_ranks(2, run):
        assert_rounded_alike(found, expected)


def test_scales_of_matrices_with_the_same_inputs_are_joined(tmp_path: pathlib.Path) -> None:
    """The joined range is that of both."""

    def writer(name: str, weight: torch.Tensor) -> formats.Written:
        is_key = name.endswith("k_proj")
        more = {"input_scale": torch.tensor(0.03 if is_key else 0.04)}
        return formats.int8(more=more | {"input_zero_point": _ZERO[0] if is_key else -_ZERO[0]})(name, weight)

    declared = formats.compressed_tensors("int-quantized", _INT8, _STATIC | {"symmetric": False})
    quantized, _ = formats.write(tmp_path, writer, declared)
    model = load(make_model_config(quantized))
    q_proj = model.decoder_layers[0].self_attn.qkv_proj  # type: ignore[attr-defined]
    q, scales, offsets = q_proj.activation_quant.quantize(torch.tensor([[-5.92, 4.41, 0.0]]))
    # from -148 * 0.04 to 147 * 0.03
    assert scales.tolist() == [pytest.approx((5.92 + 4.41) / 255)]
    assert q.tolist() == [[-128, 127, offsets.item()]]


def tokens(directory: str, **options: Any) -> list[tuple[int, ...]]:
    llm = LLM(directory, max_model_len=96, kv_cache_memory_bytes="8M", block_size=16, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": PROMPT[:n]} for n in (5, 9, 24)], sampling, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_tokens_of_an_engine(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Decoding is replayed from tapes."""
    quantized, meant = made("gptq act-order", tmp_path)
    with caplog.at_level(logging.INFO):
        assert tokens(quantized, dtype="float32") == tokens(meant, dtype="float32")
        # inputs are rounded in the norms
        writer, declared, _ = ROUNDING_INPUTS["W8A8 static asymmetric"]
        quantized, _ = formats.write(tmp_path / "W8A8", writer, declared)
        assert tokens(quantized, dtype="bfloat16") == tokens(quantized, dtype="bfloat16", enforce_eager=True)
    assert "not replayed" not in caplog.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_dtype(dtype: str, tmp_path: pathlib.Path) -> None:
    quantized, meant = made("awq", tmp_path)
    found = PagedDriver(make_model_config(quantized, dtype)).step({0: PROMPT})[0]
    expected = TransformersModel(meant).log_probs(PROMPT)
    assert (found - expected).abs().max() < {"float16": 0.05, "bfloat16": 0.4}[dtype]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"quant_method": "awq"}, "w_bit or bits must be a whole number"),
        (AWQ | {"group_size": 64, "bits": 8}, "only 4-bit weight quantization is supported for AWQ, but got 8 bits"),
        (AWQ | {"group_size": 64, "version": "GEMV"}, "layout 'gemv' are not supported; convert the checkpoint"),
        (AWQ | {"group_size": 64, "backend": "llm-awq"}, "layout 'llm-awq' are not supported"),
        (AWQ | {"group_size": 64, "zero_point": False}, "without zero points"),
        (AWQ | {"group_size": 24}, "groups of 24 inputs are not supported; they must have a multiple of 16"),
        (AWQ | {"group_size": 0}, "group_size must be positive or -1, got 0"),
        (
            AWQ | {"group_size": 64, "modules_to_not_convert": 3},
            MALFORMED,
        ),
        (
            GPTQ | {"bits": 4, "group_size": 64, "dynamic": [1]},
            MALFORMED,
        ),
        (
            GPTQ | {"bits": 4, "group_size": 64, "dynamic": {"(": {}}},
            MALFORMED,
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            MALFORMED,
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 weights in 'e5m2' are not supported"),
        (
            formats.compressed_tensors("int-quantized", _INT8, ignore=["re:("]),
            MALFORMED,
        ),
        (
            formats.compressed_tensors("int-quantized", _INT8 | {"group_size": "x"}),
            MALFORMED,
        ),
        (
            formats.compressed_tensors("x", {}, config_groups={"group_0": {}}),
            MALFORMED,
        ),
        ({"quant_method": "compressed-tensors"}, "Cannot find the config file for compressed-tensors"),
        (
            formats.compressed_tensors("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
            "nvfp4-pack-quantized with 4-bit float weights and unquantized inputs is not supported",
        ),
        (
            formats.compressed_tensors("pack-quantized", {"num_bits": 4, "type": "int"}, {"num_bits": 8}),
            "pack-quantized with 4-bit int weights and 8-bit int inputs is not supported",
        ),
        (
            GPTQ | {"bits": 5, "group_size": 64},
            "only 2/3/4/8-bit weight quantization is supported for GPTQ, but got 5",
        ),
        (GPTQ | {"bits": 4, "group_size": 64, "checkpoint_format": "gptq_p"}, "layout 'gptq_p'"),
        (GPTQ | {"bits": 4, "group_size": 64, "is_marlin_format": True}, "layout 'marlin'"),
        (
            GPTQ | {"bits": 4, "group_size": 64, "dynamic": {".*q_proj": {"bits": 8}}},
            "different rules for the matrices",
        ),
    ],
)
def test_what_is_refused(declared: dict[str, Any], words: str) -> None:
    config = make_model_config(formats.float_model(), quantization_config=declared)
    with pytest.raises(ModelLoadError, match=words):
        load(config, "dummy")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_names_of_kernels_stand_for_their_format(
    method: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where only the flag names it."""
    quantized, _ = made({"awq": "awq", "gptq": "gptq act-order"}[method], tmp_path)
    expected = tokens(quantized, dtype="float32")
    with caplog.at_level(logging.INFO):
        assert tokens(quantized, dtype="float32", quantization=f"{method}_marlin") == expected
    assert f"--quantization {method}_marlin means kernels of GPUs; it is taken as {method}" in caplog.text
    path = pathlib.Path(quantized) / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["quant_method"]
    path.write_text(json.dumps(config))
    assert tokens(quantized, dtype="float32", quantization=f"{method}_marlin") == expected


def test_flags_need_a_checkpoint_of_the_format() -> None:
    for method in ("awq", "gptq", "smoothquant", "ascend"):
        with pytest.raises(ModelLoadError, match=f"Cannot find the config file for {method}"):
            LLM(str(formats.float_model()), quantization=method, max_model_len=64, kv_cache_memory_bytes="8M")


def test_a_checkpoint_that_does_not_say_how_it_is_quantized(tmp_path: pathlib.Path) -> None:
    quantized, _ = formats.write(tmp_path, formats.awq(64), None)
    with pytest.raises(ModelLoadError, match=r"qweight is not part of Qwen2ForCausalLM; the checkpoint is quantized"):
        load(make_model_config(quantized))


def test_devices_without_products_of_quantized_weights() -> None:
    scheme = AwqScheme(QuantizationConfig("awq", AWQ | {"group_size": 64}))
    context = BuildContext(torch.float32, torch.device("meta"), quant=scheme)
    with pytest.raises(ModelLoadError, match="quantized weights do not run on meta"):
        RowParallelLinear(context, "o_proj", 64, 64)


def test_layers_quantized_in_part(tmp_path: pathlib.Path) -> None:
    writer = formats.awq(64)
    quantized, _ = formats.write(
        tmp_path, writer, AWQ | {"group_size": 64}, only=lambda name: not name.endswith("k_proj")
    )
    with pytest.raises(ModelLoadError) as caught:
        load(make_model_config(quantized))
    assert str(caught.value) == (
        "Detected some but not all shards of model.layers.0.self_attn.qkv_proj are quantized. All shards of fused "
        "layers to have the same precision."
    )


def test_biases_that_are_not_zero(tmp_path: pathlib.Path) -> None:
    writer, declared, _ = WEIGHT_ONLY["gptq with biases of zeros"]
    more = {"model.layers.0.self_attn.o_proj.bias": torch.ones(formats.HIDDEN)}
    quantized, _ = formats.write(tmp_path, writer, declared, more=more)
    with pytest.raises(ModelLoadError, match=r"o_proj\.bias is not zero, but config\.json says"):
        load(make_model_config(quantized))


@pytest.mark.parametrize(
    "groups",
    [
        lambda: torch.arange(96) // 32,
        lambda: torch.arange(40, 136) // 40,
        lambda: (torch.arange(96) // 32)[torch.randperm(96)],
        lambda: torch.randint(5, (70,)),
        lambda: torch.tensor([3]),
    ],
)
def test_groups_in_order(groups: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    found = groups()
    arranged = arrange_groups(found)
    size = arranged.group_size
    order = torch.arange(len(found)) if arranged.order is None else arranged.order
    assert size % 16 == 0 or len(arranged.columns) == 1
    assert [int(arranged.columns[place // size]) for place in range(len(order))] == found[order].tolist()
    kept = [index for place, index in enumerate(order.tolist()) if place not in arranged.padding.tolist()]
    assert sorted(kept) == list(range(len(found)))
