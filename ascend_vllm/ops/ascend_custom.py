"""Custom operators for Ascend chips, enabled by ASCEND_VLLM_CUSTOM_OPS, and the library that has them.

Their sources are in csrc_ascend/npu; CMake builds them with CANN. Otherwise torch_npu's operators are used.
Importing this module registers the enabled ones for the ops of `registry.OPS`.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Collection
from typing import Any

import torch

from ascend_vllm import envs
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.ops.native import import_op_modules
from ascend_vllm.ops.registry import implement_on_npus

logger = init_logger(__name__)

LIBRARY = "libascend_vllm_npu.so"
# where `cmake --install` puts it
DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "_npu"

# operators that this package calls
OPERATORS = ("edit_and_sample", "lora_expand", "lora_shrink", "norm_rope_store", "store_kv")
# of which one is used with the other only
_PAIR = {"lora_expand", "lora_shrink"}

_BUILD = (
    "build it with CANN: cmake -S csrc_ascend -B build/npu && cmake --build build/npu && cmake --install build/npu "
    "(docs/ascend_kernels.md), or unset ASCEND_VLLM_CUSTOM_OPS"
)


@functools.cache
def enabled() -> frozenset[str]:
    """The operators that this process uses; loads the library if there are any. torch_npu must be imported.

    Raises:
        ConfigError: ASCEND_VLLM_CUSTOM_OPS names an unknown operator, or one half of LoRA alone; see also
            `load_library`.
    """
    names = envs.ascend_custom_ops()
    if names == ("all",):
        names = OPERATORS
    for name in names:
        if name not in OPERATORS:
            raise ConfigError(
                f"ASCEND_VLLM_CUSTOM_OPS: {name!r} is no custom operator; use all, or some of {', '.join(OPERATORS)}."
            )
    if len(_PAIR & set(names)) == 1:
        raise ConfigError(f"ASCEND_VLLM_CUSTOM_OPS: {' and '.join(sorted(_PAIR))} go together.")
    if names:
        load_library()
    return frozenset(names)


@functools.cache
def load_library() -> str:
    """Loads the library once, from the loader's search path or else the package's own directory.

    Returns:
        Its path, or its name if it was on the search path.

    Raises:
        ConfigError: it does not exist, or does not load.
    """
    own = DIRECTORY / LIBRARY
    for path in (LIBRARY, str(own)):
        try:
            ctypes.CDLL(path)
        except OSError as error:
            # the library itself is missing, not one of its dependencies
            is_missing = str(error).startswith(f"{path}: cannot open shared object file")
            if not is_missing:
                raise ConfigError(
                    f"ASCEND_VLLM_CUSTOM_OPS: {path} does not load: {error}. Source CANN's set_env.sh, or {_BUILD}."
                ) from error
        else:
            return path
    raise ConfigError(
        f"ASCEND_VLLM_CUSTOM_OPS asks for custom operators, but there is no {own}, nor one on the loader's search "
        f"path: {_BUILD}."
    )


def edit_and_sample(logits: torch.Tensor, counts: torch.Tensor, *others: Any) -> torch.Tensor:
    """See `fused_sampling.edit_and_sample`."""
    # of all arguments only the logits may be strided
    *tensors, nothing = others
    ids: torch.Tensor = torch.ops.ascend_vllm_npu.edit_and_sample(
        logits, counts, *(tensor.contiguous() for tensor in tensors), nothing
    )
    return ids


def register(names: Collection[str]) -> Any:
    """Registers those custom operators that implement ops; the returned library must be kept alive."""
    return implement_on_npus({"edit_and_sample": edit_and_sample} if "edit_and_sample" in names else {})


def _report(names: Collection[str]) -> None:
    if names:
        logger.info("Custom operators of %s: %s", load_library(), ", ".join(sorted(names)))
    elif (DIRECTORY / LIBRARY).exists():
        logger.info("Custom operators are built but not used; ASCEND_VLLM_CUSTOM_OPS=all enables them")


import_op_modules()
_library = register(enabled())
_report(enabled())
