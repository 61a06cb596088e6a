"""LoRA adapters with random weights, written as PEFT writes them, and the models that they make when merged.

from tests.lora_adapters import Adapter, merged, write_adapter

adapter = Adapter("sql", rank=8, modules=("q_proj", "v_proj"))
directory = write_adapter(tmp_path / "sql", tiny_model("llama"), adapter)
model = merged(tiny_model("llama"), directory)      # transformers
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import zlib
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What an adapter is like.

    Attributes:
        name: of the adapter, from which its weights are drawn.
        rank: of all matrices that `ranks` does not name.
        alpha: scale times rank.
        modules: last parts of the changed layers' names.
        layers: numbers of the changed layers of the model; None: all.
        takes_root: rsLoRA, whose scale is alpha by the root of the rank.
        ranks: `rank_pattern`.
        alphas: `alpha_pattern`.
        as_torch: written as `adapter_model.bin`.
    """

    name: str
    rank: int = 8
    alpha: float = 16
    modules: tuple[str, ...] = ALL_LINEAR
    layers: tuple[int, ...] | None = None
    takes_root: bool = False
    ranks: dict[str, int] = dataclasses.field(default_factory=dict)
    alphas: dict[str, float] = dataclasses.field(default_factory=dict)
    as_torch: bool = False

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return next((rank for suffix, rank in self.ranks.items() if module.endswith(suffix)), self.rank)

    def scale_of(self, module: str) -> float:
        """What a module's product is multiplied by."""
        alpha = next((alpha for suffix, alpha in self.alphas.items() if module.endswith(suffix)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.takes_root else rank)

    def config(self) -> dict[str, Any]:
        """The contents of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.modules),
            "bias": "none",
            "use_rslora": self.takes_root,
            "rank_pattern": self.ranks,
            "alpha_pattern": self.alphas,
            "init_lora_weights": True,
            "lora_dropout": 0.1,
            "task_type": "CAUSAL_LM",
        }


def write_adapter(directory: pathlib.Path, model: str, adapter: Adapter, size: float = 0.5) -> str:
    """Writes an adapter for a model; `size` is about how much its products change results by."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(adapter.config()))
    generator = torch.Generator().manual_seed(zlib.crc32(adapter.name.encode()))
    tensors = {}
    for module, weight in _weights(model, adapter):
        rank, (outputs, inputs) = adapter.rank_of(module), weight.shape
        for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            drawn = torch.randn(*shape, generator=generator) / math.sqrt(shape[1])
            factor = (
                1.0 if matrix == "A" else size * weight.std().item() * math.sqrt(inputs) / adapter.scale_of(module)
            )
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = drawn * factor
    if adapter.as_torch:
        torch.save(tensors, directory / "adapter_model.bin")
    else:
        save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


def merged(model: str, directory: str, adapter: Adapter) -> Any:
    """transformers' model with the adapter's products added to its weights, in float32."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    files = pathlib.Path(directory)
    is_torch = (files / "adapter_model.bin").exists()
    tensors = (
        torch.load(files / "adapter_model.bin", weights_only=True)
        if is_torch
        else load_file(files / "adapter_model.safetensors")
    )
    for module in {name.rsplit(".lora_", 1)[0] for name in tensors}:
        a, b = (tensors[f"{module}.lora_{matrix}.weight"] for matrix in "AB")
        name = module.removeprefix("base_model.model.")
        with torch.no_grad():
            whole.get_submodule(name).weight += adapter.scale_of(name) * (b @ a)
    return whole


def _weights(model: str, adapter: Adapter) -> list[tuple[str, torch.Tensor]]:
    """Names and weights of the modules that an adapter changes."""
    found = []
    for name, weight in load_file(pathlib.Path(model) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        parts = module.split(".")
        is_chosen = adapter.layers is None or (parts[1:2] == ["layers"] and int(parts[2]) in adapter.layers)
        if parts[-1] in adapter.modules and is_chosen:
            found.append((module, weight.float()))
    return found
