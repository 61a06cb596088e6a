"""Writes a tiny model in formats of quantized weights, by what is public of each, without the code that reads them.

Beside each quantized checkpoint is an unquantized one of the weights that it means, in float32.
"""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny_models import VOCAB_SIZE, draw_weights, save_tokenizer, tiny_root

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 128, 192, 4, 2
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_LINEARS += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
# the tensors of one matrix by suffix, and the weight that they mean
Written = tuple[dict[str, torch.Tensor], torch.Tensor]
# name of a matrix, its weight [N, K] float32 → what is written of it
Writer = Callable[[str, torch.Tensor], Written]


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# models whose sizes groups of 32 and 64 divide
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    # a Llama with biases behind q, k and v
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, num_local_experts=6, num_experts_per_tok=2),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **_SIZES, **_EXPERTS, num_experts=6, shared_expert_intermediate_size=64
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **_SIZES
        | _EXPERTS
        | {
            "num_hidden_layers": 2,
            "num_key_value_heads": HEADS,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
        }
    ),
}


@functools.cache
def float_model(name: str = "qwen2") -> pathlib.Path:
    """A model of `_CONFIGS`. Do not write to it."""
    directory = tiny_root() / f"quantizable-{name}"
    config = _CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=20)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def write(
    directory: pathlib.Path,
    writer: Writer,
    declared: dict[str, Any] | None,
    *,
    base: str = "qwen2",
    only: Callable[[str], bool] = lambda _: True,
    head: bool = False,
    more: dict[str, torch.Tensor] | None = None,
    files: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[str, str]:
    """Directories of the quantized checkpoint and of what it means.

    Args:
        directory: where they are made.
        writer: of one matrix.
        declared: config.json's `quantization_config`.
        base: name of the model, one of `_CONFIGS`.
        only: which of the linear layers are quantized.
        head: whether the LM head is, too.
        more: further tensors of the quantized checkpoint, or others in the place of some.
        files: JSON files beside it, by name.
        **config: fields of its config.json.
    """
    quantized, meant = directory / "quantized", directory / "meant"
    for path in (quantized, meant):
        shutil.copytree(float_model(base), path)
    weights = load_file(meant / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        is_linear = stem.rpartition(".")[2] in _LINEARS and name != stem and only(stem)
        if not is_linear and not (head and stem == "lm_head"):
            tensors[name] = weight
            continue
        parts, weights[name] = writer(stem, weight)
        tensors |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors | (more or {}), quantized / "model.safetensors", metadata={"format": "pt"})
    save_file({name: weight.contiguous() for name, weight in weights.items()}, meant / "model.safetensors")
    if declared is not None:
        config["quantization_config"] = declared
    fields = json.loads((quantized / "config.json").read_text()) | {"dtype": "float16"} | config
    for file_name, values in {"config.json": fields, **(files or {})}.items():
        (quantized / file_name).write_text(json.dumps(values))
    return str(quantized), str(meant)


def _pack(values: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """values [R, C] → int32 [R, C * bits / 32]: each row is a stream of bits, the first value's lowest bit first."""
    stream = (values[:, :, None] >> np.arange(bits) & 1).reshape(len(values), -1)
    padded = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))).astype(np.uint8)
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def _affine(weight: torch.Tensor, bits: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, G, g], scales [N, G] float16 and zeros [N, G] of a weight [N, G, g]."""
    top = 2**bits - 1
    if symmetric:
        scales = (weight.abs().amax(2) * 2 / top).half()
        zeros = torch.full_like(scales, 2 ** (bits - 1)).int()
    else:
        low, high = weight.amin(2).clamp_max(0), weight.amax(2).clamp_min(0)
        scales = ((high - low) / top).half()
        # v1 of GPTQ cannot store a zero of 0
        zeros = (-low / scales.float()).round().clamp(1, top).int()
    codes = (weight / scales[:, :, None].float()).round() + zeros[:, :, None]
    return codes.clamp(0, top).int(), scales, zeros


def _meant(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """[N, K] float32."""
    return ((codes - zeros[:, :, None]) * scales[:, :, None].float()).flatten(1)


def awq(group_size: int) -> Writer:
    """AutoAWQ's gemm layout."""

    def writer(_name: str, weight: torch.Tensor) -> Written:
        grouped = weight.unflatten(1, (-1, weight.shape[1] if group_size == -1 else group_size))
        codes, scales, zeros = _affine(grouped, 4, symmetric=False)

        def pack(values: torch.Tensor) -> torch.Tensor:
            # nibble i of word c is output 8c + [0, 2, 4, 6, 1, 3, 5, 7][i]
            order = [8 * word + i for word in range(values.shape[1] // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
            return _pack(values[:, order].numpy(), 4)

        tensors = {"qweight": pack(codes.flatten(1).T), "qzeros": pack(zeros.T), "scales": scales.T}
        return tensors, _meant(codes, scales, zeros)

    return writer


def gptq(bits: int, group_size: int, *, symmetric: bool, order: str = "", is_v2: bool = False) -> Writer:
    """AutoGPTQ's layout; `order` is "" (no g_idx), "plain" or "act" (by a random order that q, k, v share)."""

    def writer(name: str, weight: torch.Tensor) -> Written:
        size = weight.shape[1] if group_size == -1 else group_size
        places = torch.arange(weight.shape[1])
        if order == "act":
            seed = sum(map(ord, name.rpartition(".")[0])) + weight.shape[1]
            places = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
        codes, scales, zeros = _affine(weight[:, places].unflatten(1, (-1, size)), bits, symmetric=symmetric)
        back = places.argsort()
        stored = zeros if is_v2 else zeros - 1
        tensors = {
            "qweight": _pack(codes.flatten(1)[:, back].numpy(), bits).T,
            "qzeros": _pack(stored.T.numpy(), bits),
            "scales": scales.T,
        }
        if order:
            tensors["g_idx"] = (back // size).int()
        return tensors, _meant(codes, scales, zeros)[:, back]

    return writer


def packed(bits: int, group_size: int, *, symmetric: bool, order: bool = False) -> Writer:
    """compressed-tensors' "pack-quantized"; scales are in bfloat16."""

    def writer(name: str, weight: torch.Tensor) -> Written:
        size = weight.shape[1] if group_size == -1 else group_size
        places = torch.arange(weight.shape[1])
        if order:
            seed = sum(map(ord, name.rpartition(".")[0])) + weight.shape[1]
            places = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
        codes, scales, zeros = _affine(weight[:, places].unflatten(1, (-1, size)), bits, symmetric=symmetric)
        scales, back = scales.bfloat16(), places.argsort()
        tensors = {
            "weight_packed": _pack(codes.flatten(1)[:, back].numpy(), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _pack(zeros.T.numpy(), bits).T
        if order:
            tensors["weight_g_idx"] = (back // size).int()
        return tensors, _meant(codes, scales, zeros)[:, back]

    return writer


def compressed_tensors(
    stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **values: Any
) -> dict[str, Any]:
    """A `quantization_config` with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    } | values


def int8(
    *, per_output: bool = True, zero_points: bool = False, more: dict[str, torch.Tensor] | None = None
) -> Writer:
    """compressed-tensors' "int-quantized"; `more` is written beside each weight."""

    def writer(_name: str, weight: torch.Tensor) -> Written:
        scales = (weight.abs().amax(1, keepdim=True) if per_output else weight.abs().amax()[None]) / 127
        zeros = torch.randint(-9, 9, scales.shape, dtype=torch.int8) * zero_points
        values = ((weight / scales).round() + zeros).clamp(-128, 127).to(torch.int8)
        tensors = {"weight": values, "weight_scale": scales} | ({"weight_zero_point": zeros} if zero_points else {})
        return tensors | {key: value.clone() for key, value in (more or {}).items()}, (
            values.float() - zeros
        ) * scales

    return writer


def fp8(kind: str, scale: str = "weight_scale") -> Writer:
    """8-bit floats with a scale per "tensor", "channel" or "block" of 64 by 64."""

    def writer(_name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        sizes = {"tensor": (rows, columns), "channel": (1, columns), "block": (64, 64)}[kind]
        blocks = torch.nn.functional.pad(weight, (0, -columns % sizes[1], 0, -rows % sizes[0]))
        blocks = blocks.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0]))
        scales = blocks.abs().amax((1, 3)) / 448
        every = scales.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[:rows, :columns]
        values = (weight / every).to(torch.float8_e4m3fn)
        return {"weight": values, scale: scales.reshape(()) if kind == "tensor" else scales}, values.float() * every

    return writer


def smoothquant(qkv: str, out: str, fc1: str, fc2: str, scale: float) -> tuple[Writer, dict[str, Any]]:
    """AutoSmoothQuant's layout: a writer, and further arguments of `write`.

    Args:
        qkv: "per-tensor" or "per-token"; so are the next ones.
        out: of o_proj.
        fc1: of gate_proj and up_proj.
        fc2: of down_proj.
        scale: of all inputs that are rounded per tensor.
    """
    kinds = {"o_proj": out, "down_proj": fc2, "gate_proj": fc1, "up_proj": fc1}
    more = {}
    for name, weight in load_file(float_model() / "model.safetensors").items():
        before = {"input_layernorm": qkv, "post_attention_layernorm": fc1}.get(name.split(".")[-2])
        if before == "per-tensor":
            more[name] = weight / scale

    def writer(name: str, weight: torch.Tensor) -> Written:
        part = name.rpartition(".")[2]
        is_static = kinds.get(part, qkv) == "per-tensor"
        weight_scale = weight.abs().amax() / 127
        values = (weight / weight_scale).round().to(torch.int8)
        tensors = {"weight": values, "dequant_scale": weight_scale * (scale if is_static else 1.0)}
        if is_static and part in ("o_proj", "down_proj"):
            tensors["quant_scale"] = torch.tensor(scale)
        return tensors, values.float() * weight_scale

    stated = {"qkv": qkv, "out": out, "fc1": fc1, "fc2": fc2, "type": "int8"}
    return writer, {"more": more, "files": {"quant_config.json": stated}}


def modelslim(
    kind: str, scale: float = 0.04, offset: int = -20, *, has_bits: bool = False, base: str = "qwen2"
) -> tuple[Writer, Any]:
    """ModelSlim's layout: a writer, and further arguments of `write`.

    Args:
        kind: "W8A8", "W8A8_DYNAMIC" or "W8A16".
        scale: of inputs of W8A8.
        offset: of inputs of W8A8, and of weights of W8A16.
        has_bits: deq_scale is the bits of a float32 in an int64, as for models in float16.
        base: name of the model.
    """
    floats = load_file(float_model(base) / "model.safetensors")
    description = {"model_quant_type": kind, "lm_head.weight": "FLOAT"}

    def writer(name: str, weight: torch.Tensor) -> Written:
        weight_scale = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / weight_scale).round()
        description.update({f"{name}.weight": kind})
        if kind != "W8A8":
            zero = torch.full_like(weight_scale, 3.0 if kind == "W8A16" else 0.0)
            values = (values - zero).clamp(-128, 127)
            tensors = {"weight": values.to(torch.int8), "weight_scale": weight_scale, "weight_offset": zero}
            return tensors, (values + zero) * weight_scale
        deq_scale = (weight_scale * scale)[:, 0]
        bias = floats.get(f"{name}.bias", torch.zeros(len(weight)))
        quant_bias = (bias / deq_scale - offset * values.sum(1)).round().int()
        tensors = {
            "weight": values.to(torch.int8),
            "input_scale": torch.tensor([scale]),
            "input_offset": torch.tensor([float(offset)]),
            "deq_scale": deq_scale.view(torch.int32).long() if has_bits else deq_scale,
            "quant_bias": quant_bias,
            # as version 26 of the tool, though deq_scale contains it
            "weight_scale": weight_scale,
            "weight_offset": torch.zeros_like(weight_scale),
        }
        return tensors, values * weight_scale

    return writer, {"files": {"quant_model_description.json": description}}
