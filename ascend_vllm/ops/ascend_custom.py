"""The custom operators for Ascend chips: which there are, which are asked for, and the library that has them.

csrc_ascend/npu has their sources; CMake builds them with CANN. They work behind ASCEND_VLLM_CUSTOM_OPS only: where
it is unset, or names none of them, torch_npu's operators compute everything. Importing this module makes the ops of
`registry.OPS` use those that are asked for.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import torch

from ascend_vllm import envs
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.ops.native import import_op_modules
from ascend_vllm.ops.registry import NAMESPACE

logger = init_logger(__name__)

LIBRARY = "libascend_vllm_npu.so"
# where `cmake --install` puts it
DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "_npu"

# those that something here calls; the condition under which it does
CONDITIONS: dict[str, str] = {
    "apply_penalties": "",
    "store_kv": "",
    "prefix_attention": "USE_PREFIX_HIGH_PRECISION_MODE=1",
    "decode_attention": "USE_IFA_HIGH_PRECISION_MODE=1",
}
# built and tested, and nothing here calls them
WITHOUT_CALLER = ("advance_step", "lora_expand", "lora_shrink")

_BUILD = (
    "build it with CANN: cmake -S csrc_ascend -B build/npu && cmake --build build/npu && cmake --install build/npu "
    "(docs/ascend_kernels.md), or unset ASCEND_VLLM_CUSTOM_OPS"
)


def requested() -> frozenset[str]:
    """The operators that ASCEND_VLLM_CUSTOM_OPS names.

    Raises:
        ConfigError: it names one that there is not, or that nothing calls.
    """
    names = envs.ascend_custom_ops()
    if names == ("all",):
        return frozenset(CONDITIONS)
    for name in names:
        if name not in CONDITIONS:
            why = "is called by nothing yet" if name in WITHOUT_CALLER else "is no custom operator"
            raise ConfigError(
                f"ASCEND_VLLM_CUSTOM_OPS: {name!r} {why}; use all, or some of {', '.join(sorted(CONDITIONS))}."
            )
    return frozenset(names)


@functools.cache
def taken() -> frozenset[str]:
    """The operators that this process uses; the library is loaded if there are any. torch_npu is imported already.

    Raises:
        ConfigError: see `requested`; or the library is not there, or does not load.
    """
    names = requested()
    if names:
        load_library()
    return names


@functools.cache
def load_library() -> str:
    """Loads the library, once: the loader's search path comes first, then the package's own directory.

    Returns:
        What was loaded.

    Raises:
        ConfigError: it is not there, or does not load.
    """
    own = DIRECTORY / LIBRARY
    for path in (LIBRARY, str(own)):
        try:
            ctypes.CDLL(path)
        except OSError as error:
            # of the library itself, and not of one that it needs
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


def apply_penalties(logits: torch.Tensor, *others: torch.Tensor) -> None:
    """See `sampling.apply_penalties`."""
    # the operator reads strided logits, and nothing else that is strided
    torch.ops.ascend_vllm_npu.apply_penalties(logits, *(tensor.contiguous() for tensor in others))


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"apply_penalties": apply_penalties}


def register(names: Collection[str]) -> Any:
    """Makes ops compute with custom operators on NPUs; returns what keeps the registration alive.

    Args:
        names: of the operators that are used.
    """
    # Any: torch leaves this class without annotations
    library: Any = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for name, implementation in IMPLEMENTATIONS.items():
        if name in names:
            library.impl(name, implementation, "PrivateUse1")
    return library


def _report(names: Collection[str]) -> None:
    if names:
        told = [f"{name} (with {CONDITIONS[name]})" if CONDITIONS[name] else name for name in sorted(names)]
        logger.info("Custom operators of %s: %s", load_library(), ", ".join(told))
    elif (DIRECTORY / LIBRARY).exists():
        logger.info("Custom operators are built but not used; ASCEND_VLLM_CUSTOM_OPS=all takes them")


import_op_modules()
_library = register(taken())
_report(taken())
