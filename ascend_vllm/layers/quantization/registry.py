"""Makes the quantization scheme for the format of a checkpoint; the table is in config/quantization.py."""

from __future__ import annotations

from ascend_vllm import plugins
from ascend_vllm.config.quantization import QuantizationConfig, scheme_target
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import QuantScheme


def make_scheme(model: str, config: QuantizationConfig) -> QuantScheme:
    """The scheme of a quantized checkpoint.

    Args:
        model: its directory, for messages.
        config: its format.

    Raises:
        ModelLoadError: no scheme supports the format or its parameters, or its class cannot be imported.
    """
    target = scheme_target(config.method)
    if target is None:
        raise ModelLoadError(f"{model}: config.json has a quantization_config, which is not supported")
    try:
        scheme_class = plugins.import_object(target)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"quantization {config.method!r}: cannot import {target}: {error}") from error
    scheme = scheme_class(config)
    if not isinstance(scheme, QuantScheme):
        raise ModelLoadError(f"quantization {config.method!r}: {target} is no {QuantScheme.__name__}")
    return scheme
