"""Runs in the environment of a tool: quantizes a checkpoint, or dequantizes one with the tool's own reader.

    python programs.py write TOOL SOURCE OUTPUT
    python programs.py read QUANTIZED SOURCE OUTPUT

`read` writes SOURCE with the weights in float32 that QUANTIZED means.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
from typing import Any

# GPTQModel wants more threads than a machine of two cores has, and asks when it is imported
os.cpu_count = lambda: 8
os.sched_getaffinity = lambda _pid: set(range(8))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "One two three four five six seven eight nine. " * 5,
] * 16
IGNORED = ["lm_head", "re:.*gate$"]
GROUP_SIZE = 32


def compress(name: str, source: str, output: str) -> None:
    """llm-compressor; `name` is one of its schemes, or bits and symmetry of groups."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    grouped = {"W4A16": (4, True), "W8A16-asym": (8, False)}
    if name in grouped:
        bits, symmetric = grouped[name]
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "group",
            "group_size": GROUP_SIZE,
        }
        recipe = QuantizationModifier(
            ignore=IGNORED, config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}
        )
    else:
        recipe = QuantizationModifier(targets="Linear", scheme=name, ignore=IGNORED)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    oneshot(model=model, recipe=recipe, output_dir=output, tokenizer=tokenizer)
    tokenizer.save_pretrained(output)


def auto_round(name: str, source: str, output: str) -> None:
    """AutoRound's rounding without tuning; `name` is a format of its exports."""
    from auto_round import AutoRound

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    options = {"bits": 4, "group_size": GROUP_SIZE, "sym": name == "auto_gptq", "iters": 0, "disable_opt_rtn": True}
    tool = AutoRound(model, AutoTokenizer.from_pretrained(source), device_map="cpu", **options)
    tool.quantize_and_save(output, format=name)


def gptqmodel(name: str, source: str, output: str) -> None:
    """GPTQModel; `name` says what differs from 4 bits."""
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=8 if "8" in name else 4, group_size=GROUP_SIZE, desc_act="act" in name, sym="asym" not in name
    )
    model = GPTQModel.load(source, config)
    model.quantize(TEXTS, batch_size=1)
    model.save(output)


def tensors_of(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def decompressed(stored: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Matrices that compressed-tensors reads, by name."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    found = {}
    for name in [name for name in stored if name.endswith(".weight_scale")]:
        stem = name.removesuffix(".weight_scale")
        scale, zero = stored[name].float(), stored.get(f"{stem}.weight_zero_point")
        values = stored.get(f"{stem}.weight")
        if values is None:
            shape = torch.Size(stored[f"{stem}.weight_shape"].tolist())
            values = unpack_from_int32(stored[f"{stem}.weight_packed"], args.num_bits, shape)
            if zero is not None:
                zero = unpack_from_int32(zero, args.num_bits, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
        found[f"{stem}.weight"] = dequantize(values, scale, zero, args, torch.float32)
    return found


def dequantized(directory: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Matrices that GPTQModel reads, of GPTQ and AWQ, by name."""
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    is_awq = config["quant_method"] == "awq"
    backend = BACKEND.TORCH_AWQ if is_awq else BACKEND.TORCH
    model = GPTQModel.load(directory, backend=backend, device="cpu", dtype=torch.float16)
    found = {}
    for name, module in model.model.named_modules():
        if hasattr(module, "qweight"):
            module.scales.data = module.scales.data.float()
            parts = (module.qweight, module.qzeros, module.scales, module.bits, module.group_size) if is_awq else ()
            weight = dequantize_gemm(*parts) if is_awq else module.dequantize_weight()
            found[f"{name}.weight"] = weight.T
    return found


def read(quantized: str, source: str, output: str) -> None:
    """Writes what a quantized checkpoint means."""
    shutil.copytree(source, output)
    path = pathlib.Path(output) / "model.safetensors"
    weights, stored = load_file(path), tensors_of(pathlib.Path(quantized))
    config = json.loads((pathlib.Path(quantized) / "config.json").read_text())["quantization_config"]
    is_compressed = config["quant_method"] == "compressed-tensors"
    found = decompressed(stored, config) if is_compressed else dequantized(quantized, config)
    meant = {name: found.get(name, stored.get(name)) for name in weights}
    assert found, "nothing is quantized"
    assert all(meant[name].shape == weight.shape for name, weight in weights.items())
    save_file({name: tensor.float().contiguous() for name, tensor in meant.items()}, path, metadata={"format": "pt"})


WRITERS = {"llm-compressor": compress, "auto-round": auto_round, "gptqmodel": gptqmodel}

if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    if action == "read":
        read(*arguments)
    else:
        tool, name = arguments[0].split(":")
        WRITERS[tool](name, *arguments[1:])
