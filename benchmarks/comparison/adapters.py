"""LoRA adapters with random weights for a comparison."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np
from safetensors.numpy import save_file

from comparison.limits import shapes_of

# last parts of the layers' names
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# of what the adapter changes, beside what the model computes: only the time counts
_SIZE = 1e-3


def write_adapters(directory: pathlib.Path, model: str, count: int, rank: int) -> dict[str, str]:
    """Writes adapters of all linear layers of attention and MLP, in float32 as PEFT does.

    Args:
        directory: in which each gets one of its own.
        model: directory of the model.
        count: how many.
        rank: of all matrices.

    Returns:
        Their directories by their names.
    """
    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes_of(model).items()
        if name.removesuffix(".weight").rpartition(".")[2] in _MODULES
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(_MODULES),
        "bias": "none",
    }
    found = {}
    for number in range(count):
        target = directory / f"adapter-{number}"
        target.mkdir(parents=True)
        (target / "adapter_config.json").write_text(json.dumps(config))
        draw = np.random.default_rng(number)
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = draw.standard_normal(shape, dtype=np.float32) * (_SIZE / math.sqrt(shape[1]))
                tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = values
        save_file(tensors, target / "adapter_model.safetensors")
        found[target.name] = str(target)
    return found
