"""How the weights of a checkpoint are kept, and which formats can be served.

Nothing here imports torch: the API-server process asks whether a format has a scheme before a worker starts. Packages
add formats with entry points of the group `ascend_vllm.quantization`; in their pyproject.toml::

    [project.entry-points."ascend_vllm.quantization"]
    my-format = "my_package.quantization:MyScheme"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ascend_vllm import plugins

ENTRY_POINT_GROUP = "ascend_vllm.quantization"
_FORMATS = "ascend_vllm.layers.quantization"

# format → "module:Class" of its `QuantScheme` (layers/quantization/base.py), imported when a model is loaded
SCHEMES: dict[str, str] = {
    "ascend": f"{_FORMATS}.modelslim:ModelSlimScheme",
    "awq": f"{_FORMATS}.awq:AwqScheme",
    "awq_marlin": f"{_FORMATS}.awq:AwqScheme",
    "compressed-tensors": f"{_FORMATS}.compressed_tensors:CompressedTensorsScheme",
    "fbgemm_fp8": f"{_FORMATS}.fp8:Fp8Scheme",
    "fp8": f"{_FORMATS}.fp8:Fp8Scheme",
    "gptq": f"{_FORMATS}.gptq:GptqScheme",
    "gptq_marlin": f"{_FORMATS}.gptq:GptqScheme",
    "int8_per_channel_weight_only": f"{_FORMATS}.online:OnlineScheme",
    "smooth_quant": f"{_FORMATS}.smoothquant:SmoothQuantScheme",
    "smoothquant": f"{_FORMATS}.smoothquant:SmoothQuantScheme",
    "weight_only_int8": f"{_FORMATS}.online:OnlineScheme",
}
# name of vLLM's kernels of GPUs for a format → the format
OF_KERNELS = {"awq_marlin": "awq", "gptq_marlin": "gptq"}
# --quantization → other names in checkpoints that it agrees with
CONFIRMS: dict[str, tuple[str, ...]] = {
    **{kernels: (method,) for kernels, method in OF_KERNELS.items()},
    "smoothquant": ("smooth_quant",),
    "smooth_quant": ("smoothquant",),
    "weight_only_int8": ("compressed-tensors", "int8_per_channel_weight_only"),
}

_CONVERT = "serve the unquantised model, or its AWQ, GPTQ or compressed-tensors checkpoint"
# format that is not read → what to do instead
ADVICE: dict[str, str] = {
    "aqlm": _CONVERT,
    "auto-round": "export it again in AutoRound's format auto_gptq or auto_awq",
    "bitsandbytes": _CONVERT,
    "deepspeedfp": _CONVERT,
    "eetq": _CONVERT,
    "exl2": _CONVERT,
    "exl3": _CONVERT,
    "experts_int8": _CONVERT,
    "gguf": "GGUF files are for llama.cpp; serve the model's directory in Hugging Face layout",
    "gptq_marlin_24": _CONVERT,
    "hqq": _CONVERT,
    "ipex": "AWQ and GPTQ checkpoints are served as --quantization awq and gptq, or without the flag",
    "marlin": "its layout is of GPUs; serve the GPTQ checkpoint that it was made from",
    "modelopt": _CONVERT,
    "mxfp4": _CONVERT,
    "neuron_quant": _CONVERT,
    "qqq": _CONVERT,
    "quark": _CONVERT,
    "torchao": _CONVERT,
    "tpu_int8": "--quantization weight_only_int8 makes 8-bit weights while loading",
}


class QuantizationConfig(msgspec.Struct, frozen=True):
    """What is known of a quantized checkpoint's format. The format's scheme checks the parameters.

    Attributes:
        method: name of the format, by config.json (`quant_method`) or --quantization; None: neither names one.
        parameters: what the checkpoint says of it: config.json's `quantization_config`, or a file beside it
            (`args/quantization_files.py`).
    """

    method: str | None
    parameters: dict[str, Any] = {}


def read_quantization(declared: Mapping[str, Any] | None, method: str | None) -> QuantizationConfig | None:
    """Reads config.json's `quantization_config`.

    Args:
        declared: the object, if there is one.
        method: --quantization; counts where config.json names no format.

    Returns:
        None if the checkpoint is not quantized.
    """
    if not declared:
        return None if method is None else QuantizationConfig(method)
    stated = declared.get("quant_method")
    return QuantizationConfig(stated if isinstance(stated, str) else method, dict(declared))


def scheme_target(method: str | None) -> str | None:
    """ "module:Class" of the scheme of a format; None if there is none. This package's own table comes first."""
    if method is None:
        return None
    return SCHEMES.get(method) or plugins.entry_points(ENTRY_POINT_GROUP).get(method)
