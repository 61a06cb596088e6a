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

# format → "module:Class" of its `QuantScheme` (layers/quantization/base.py), imported when a model is loaded
SCHEMES: dict[str, str] = {}


class QuantizationConfig(msgspec.Struct, frozen=True):
    """What is known of a quantized checkpoint's format. The format's scheme checks the parameters.

    Attributes:
        method: name of the format, by config.json (`quant_method`) or --quantization; None: neither names one.
        parameters: all of config.json's `quantization_config`.
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
