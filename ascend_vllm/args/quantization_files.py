"""Finds out how the weights of a model directory are quantized: from config.json, or from a file beside it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from ascend_vllm.config.quantization import CONFIRMS, OF_KERNELS
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.model_files import is_there, read_json

logger = init_logger(__name__)

# what AutoSmoothQuant's file says of the layers of an attention and an MLP
_SMOOTHQUANT_KEYS = {"qkv", "out", "fc1", "fc2"}
_MODELSLIM_FILES = "quant_model_description*.json"


def stated_quantization(directory: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its quantization, with the format's name as `quant_method`; {} if it says nothing.

    Args:
        directory: of the model.
        config: its config.json; its `quantization_config` counts before any other file.

    Raises:
        ModelLoadError: a file beside config.json is broken.
    """
    declared = config.get("quantization_config")
    if isinstance(declared, dict) and declared:
        return declared
    # the older name of compressed-tensors
    declared = config.get("compression_config")
    if isinstance(declared, dict) and declared:
        return {"quant_method": "compressed-tensors"} | declared
    if paths := sorted(directory.glob(_MODELSLIM_FILES)):
        of_kind = directory / f"quant_model_description_{config.get('quantize')}.json"
        return {"quant_method": "ascend", "description": read_json(of_kind if of_kind in paths else paths[0], dict)}
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        if is_there(directory / name) and (declared := read_json(directory / name, dict)):
            return {"quant_method": _method_of(name, declared)} | declared
    return {}


def _method_of(file_name: str, declared: Mapping[str, Any]) -> str:
    """The format of a file that does not name it."""
    if file_name == "hf_quant_config.json":
        return "modelopt"
    if declared.keys() >= _SMOOTHQUANT_KEYS:
        return "smoothquant"
    # AutoAWQ's own file has "w_bit", "q_group_size" and "version"; AutoGPTQ's "bits", "group_size" and "desc_act"
    is_awq = "w_bit" in declared or "zero_point" in declared or file_name == "quant_config.json"
    return "awq" if is_awq else "gptq"


def check_quantization(requested: str | None, stated: Mapping[str, Any]) -> None:
    """Checks --quantization against the checkpoint.

    Args:
        requested: --quantization; None: not given.
        stated: what `stated_quantization` returned.

    Raises:
        ConfigError: they name different formats.
    """
    method = stated.get("quant_method")
    if requested is None or method is None or method in (requested, *CONFIRMS.get(requested, ())):
        if requested in OF_KERNELS:
            meant = OF_KERNELS[requested]
            logger.info("--quantization %s means kernels of GPUs; it is taken as %s", requested, meant)
        return
    raise ConfigError(
        f"Quantization method specified in the model config ({method}) does not match the quantization method "
        f"specified in the `quantization` argument ({requested})."
    )


def float_architecture(architecture: str, stated: Mapping[str, Any]) -> str:
    """The class of the model that was quantized: AutoSmoothQuant writes the names of its own.

    Example:
        >>> float_architecture("QuantizedLlamaForCausalLM", {"quant_method": "smoothquant"})
        'LlamaForCausalLM'
    """
    if stated.get("quant_method") not in ("smoothquant", "smooth_quant"):
        return architecture
    return re.sub("^(Quantized|Int8)", "", architecture)
