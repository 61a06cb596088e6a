"""The devices that workers can run on, see `get_platform`.

Implementations are imported when they are needed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import device_facts, npu_unusable_reason

if TYPE_CHECKING:
    from ascend_vllm.platforms.interface import Platform

logger = init_logger(__name__)

# what --device accepts; "auto" is an NPU if one can be used, else the CPU
DEVICES = ("auto", "cpu", "npu")


def resolve_device(device: str) -> str:
    """The platform's name behind a --device value.

    Raises:
        ConfigError: the value is unknown.

    Example::

        resolve_device("auto")      # "cpu" on a machine without an NPU, and the log says why
    """
    if device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}.")
    if device != "auto":
        return device
    reason = npu_unusable_reason() or device_facts("npu").refusal
    if reason is None:
        return "npu"
    if importlib.util.find_spec("torch_npu") is not None:
        # torch_npu is installed, so that NPUs were probably expected
        logger.warning("--device auto takes the CPU, for no NPU can be used. %s", reason)
    else:
        logger.info("--device auto takes the CPU: torch_npu is not installed")
    return "cpu"


def get_platform(device: str) -> Platform:
    """The platform of a --device value; not initialised.

    Raises:
        ConfigError: the value is unknown.
    """
    if resolve_device(device) == "npu":
        from ascend_vllm.platforms.npu import NpuPlatform

        return NpuPlatform()
    from ascend_vllm.platforms.cpu import CpuPlatform

    return CpuPlatform()
