"""Reads what a checkpoint says of its quantization format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ModelLoadError


def first_of(parameters: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first of several names that is there."""
    return next((parameters[name] for name in names if parameters.get(name) is not None), default)


def required_of(config: QuantizationConfig, *names: str) -> int:
    """A whole number, under any of several names.

    Raises:
        ModelLoadError: it is missing, or is none.
    """
    if not config.parameters:
        raise ModelLoadError(f"Cannot find the config file for {config.method}")
    value = first_of(config.parameters, *names)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelLoadError(
            f"quantization {config.method!r}: {' or '.join(names)} must be a whole number, got {value!r}"
        )
    return value


def check_group_size(size: int) -> int:
    """Returns the size of groups, -1 for one of all inputs.

    Raises:
        ModelLoadError: it is neither positive nor -1.
    """
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise ModelLoadError(f"a quantization group_size must be positive or -1, got {size!r}")
    return size
