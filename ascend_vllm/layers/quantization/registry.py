"""Makes the quantization scheme for the format of a checkpoint; the table is in config/quantization.py."""

from __future__ import annotations

import re

from ascend_vllm import plugins
from ascend_vllm.config.quantization import ADVICE, SCHEMES, QuantizationConfig, scheme_target
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import QuantScheme
from ascend_vllm.model_files import one_line

# where the parameters of a format come from
_DECLARED = "quantization_config in config.json, or the file beside it"


def make_scheme(model: str, config: QuantizationConfig) -> QuantScheme:
    """The scheme of a quantized checkpoint.

    Args:
        model: its directory, for messages.
        config: its format.

    Raises:
        ModelLoadError: no scheme supports the format or its parameters, or its class cannot be imported.
    """
    if config.method is None:
        raise ModelLoadError(
            f"{model}: quantization_config in config.json has no quant_method; name the format with --quantization"
        )
    target = scheme_target(config.method)
    if target is None:
        advice = ADVICE.get(config.method)
        if advice is None:
            names = ", ".join(sorted(SCHEMES))
            raise ModelLoadError(f"{model}: quantization {config.method!r} is not supported; supported are {names}")
        raise ModelLoadError(f"{model}: quantization {config.method!r} is not supported: {advice}")
    try:
        scheme_class = plugins.import_object(target)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"quantization {config.method!r}: cannot import {target}: {error}") from error
    try:
        scheme = scheme_class(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{model}: {_DECLARED}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise ModelLoadError(f"{model}: {_DECLARED} is malformed: {one_line(error)}") from error
    if not isinstance(scheme, QuantScheme):
        raise ModelLoadError(f"quantization {config.method!r}: {target} is no {QuantScheme.__name__}")
    return scheme
